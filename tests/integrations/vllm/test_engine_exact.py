"""What an engine answers does not depend on its state: warm, partly warm or evicted prefixes, preemption, chunk sizes,
cache formats, the way in which a schedule of indexers is written.

The matrix products of vLLM's own layers have one shape here (see ``scripts/soak.py``), so that the bits of its fp32
layers do not change with the number of rows, and nothing else may: tokens and operator hashes are compared exactly, and
logprobs but for the last bits of a softmax.
"""

from __future__ import annotations

import json
import random
import statistics

import pytest

from sparse_mla.integrations.vllm import trace
from sparse_mla.testing.tiny_model import tiny_config, write_tiny_model
from sparse_mla.verify.engine_judgement import TOLERANCE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOPK = 64
LAST_BITS = 1e-5
BLOCK = 16
SMALL_CACHE = {"max_model_len": 400, "num_gpu_blocks_override": 27, "block_size": BLOCK}  # 26 blocks: one long request
SHARING = {"num_hidden_layers": 4, "index_topk_freq": 3}  # as below; two own ones tell the nearest from the first
KINDS = ["full", "full", "shared", "shared"]
PATTERN = "FFSS"
CUTS = (96, 512)


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 512) for _ in range(length)]


DOCUMENT = prompt(300, 1)
BRANCH = DOCUMENT[:170] + prompt(120, 2)
OTHERS = [prompt(380, seed) for seed in (3, 4)]
CROWD = [prompt(length, length) for length in (70, 75, 90, 66, 80, 85)]
READ = prompt(400, 5)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Checkpoints with the same weights whose configs state one schedule of indexers in two ways, and one wrongly."""
    folder = tmp_path_factory.mktemp("sharing")
    usual = tiny_config(**SHARING)
    silent = {name: value for name, value in usual.items() if name != "index_topk_freq"}
    configs = {
        "freq": usual,
        "types": silent | {"indexer_types": KINDS},
        "at odds": usual | {"indexer_types": ["full", "full", "shared", "full"]},
    }
    write_tiny_model(folder / "freq", **SHARING)
    for name, config in configs.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        if name != "freq":
            (folder / name / "model.safetensors").symlink_to(folder / "freq" / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def served(run_jobs, tiny, models, traces):
    """One child process, an engine after another."""
    generated = {"model": str(tiny), "logprobs": False, "tokens": 40}
    jobs = {
        "alone": {
            **generated,
            "engine": {"max_num_batched_tokens": 512},
            "batches": [[one] for one in (DOCUMENT, BRANCH, *CROWD)],
        },
        "reuse": {
            **generated,
            "engine": {**SMALL_CACHE, "enable_prefix_caching": True, "max_num_batched_tokens": 128},
            "batches": [[DOCUMENT], [DOCUMENT], [BRANCH], *([one] for one in OTHERS), [DOCUMENT]],
        },
        "preempted": {
            **generated,
            "engine": {**SMALL_CACHE, "disable_log_stats": False, "max_num_batched_tokens": 128},
            "batches": [CROWD],
        },
    }
    for name, dtype, latent in (("bf16", "bfloat16", "auto"), ("fp8_ds_mla", "bfloat16", "fp8_ds_mla")):
        for cut in CUTS:
            jobs[f"{name} {cut}"] = {
                "model": str(tiny),
                "engine": {"dtype": dtype, "kv_cache_dtype": latent, "max_num_batched_tokens": cut},
                "batches": [[READ]],
                "tokens": 4,
                "env": {"SPARSE_MLA_TRACE": str(traces / f"{name} {cut}")},
            }
    jobs |= sharing_jobs(models)
    results, _ = run_jobs(list(jobs.values()), ONE_SHAPE="1")
    return dict(zip(jobs, results, strict=True))


def sharing_jobs(models):
    read = {"batches": [[READ]], "tokens": 4, "engine": {"max_num_batched_tokens": 96}}
    whole = {**read, "engine": {"max_num_batched_tokens": 512}}
    override = {"hf_overrides": {"index_topk_pattern": PATTERN}}
    file = str(models / "recorded.safetensors")
    ask = {"ids": READ, "tokens": 4, "trace": "", "record": file, "fault": ""}
    return {
        "freq": {**read, "model": str(models / "freq"), "batches": [[READ], [READ]], "stale": 1},
        "freq, whole": {**whole, "model": str(models / "freq")},
        "types": {**read, "model": str(models / "types")},
        "types, cured": {**read, "model": str(models / "types"), "engine": {**read["engine"], **override}},
        "at odds": {**read, "model": str(models / "at odds")},
        "recorded": {
            "record": {
                "model": str(models / "freq"),
                "engine": read["engine"],
                "environment": {"SPARSE_MLA_INDEX_KEYS": "plain"},
                "prompts": [ask],
                "indexers": KINDS.count("full"),
            },
            "env": {"SPARSE_MLA_INDEX_KEYS": "plain", "SPARSE_MLA_TRACE": ""},
        },
        "transformers": {
            "transformers": {"model": str(models / "freq"), "ids": READ, "record": file, "by_reference": False}
        },
    }


def answers(served, job):
    assert "error" not in served[job], served[job]
    return [one for batch in served[job]["batches"] for one in batch]


def same(mine, theirs):
    assert mine["tokens"] == theirs["tokens"]
    for name in ("logprobs", "prompt_logprobs"):
        assert mine[name] == pytest.approx(theirs[name], abs=LAST_BITS, rel=0), name


def test_a_warm_partly_warm_or_evicted_prefix_changes_nothing(served):
    cold, warm, branch, _, _, evicted = answers(served, "reuse")
    document, branch_alone, *_ = answers(served, "alone")
    assert (cold["cached"], warm["cached"], branch["cached"]) == (0, 288, 160)
    assert evicted["cached"] < 160  # two other prompts needed its blocks
    for answer in (cold, warm, evicted):
        same(answer, document)
    same(branch, branch_alone)


def test_preemption_changes_nothing(served):
    assert served["preempted"]["preemptions"] > 0
    for mine, alone in zip(answers(served, "preempted"), answers(served, "alone")[2:], strict=True):
        same(mine, alone)


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla"])
def test_every_cache_format_gives_the_same_bits_for_every_chunk_size(served, traces, name):
    (short,), (whole,) = (answers(served, f"{name} {cut}") for cut in CUTS)
    same(short, whole)
    mine, theirs = (trace.load(traces / f"{name} {cut}") for cut in CUTS)
    assert {key[2] for key in mine} == set(trace.STAGES)
    assert mine == theirs
    assert all(sorted(rows) == list(range(len(READ) + 3)) for rows in mine.values())


def test_the_formats_are_not_the_same_thing(served, traces):
    """Else the test above would judge one format twice."""
    plain, packed = (trace.load(traces / f"{name} {CUTS[0]}") for name in ("bf16", "fp8_ds_mla"))
    keys = [key for key in plain if key[2] == "latent_cache"]
    assert keys
    assert all(not set(plain[key].values()) & set(packed[key].values()) for key in keys)


def test_layers_that_share_indices_do_not_depend_on_chunks(served):
    (short, _), (whole,) = answers(served, "freq"), answers(served, "freq, whole")
    same(short, whole)


def test_every_way_to_state_a_schedule_gives_the_same_answer(served):
    """``index_topk_freq`` in the config, and ``indexer_types`` there with ``index_topk_pattern`` as vLLM reads it."""
    (mine, _), (theirs,) = answers(served, "freq"), answers(served, "types, cured")
    assert mine == theirs


def test_a_schedule_that_vllm_does_not_read_is_refused_with_the_flag_that_cures_it(served):
    error = served["types"]["error"]
    assert "vLLM built layer 2 otherwise than the config states" in error
    assert f"""--hf-overrides '{{"index_topk_pattern": "{PATTERN}"}}'""" in error


def test_schedules_at_odds_are_refused(served):
    assert "indexer_types and index_topk_freq disagree at layer 3" in served["at odds"]["error"]


def test_indices_of_an_earlier_step_would_be_noticed(served):
    """A control of the tests above: shared layers that read the indices of the step before move most logprobs."""
    right, stale = answers(served, "freq")
    moves = [abs(a - b) for a, b in zip(right["prompt_logprobs"], stale["prompt_logprobs"], strict=True)]
    first, later = moves[: TOPK - 1], moves[96 + TOPK :]
    assert max(first) < LAST_BITS  # the first step has none before it
    assert statistics.median(later) > 100 * TOLERANCE


def test_transformers_agrees_with_layers_that_share_indices(served):
    (mine,), theirs = served["recorded"]["answers"], served["transformers"]
    assert theirs["layers"] == KINDS.count("full")
    assert theirs["wrong"] == ""
    assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=TOLERANCE, rel=0)
    assert mine["tokens"][0] == theirs["next_token"]
