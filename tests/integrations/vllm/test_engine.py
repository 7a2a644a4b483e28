"""A real vLLM serves a DSA model that it refuses on its own, and chunking, company and history change nothing."""

from __future__ import annotations

import json
import random

import pytest
import torch

from sparse_mla.integrations.vllm import trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

REFUSAL = "NotImplementedError: Sparse Attention is not supported on CPU."
LENGTH = 2100
TOPK = 64
CHUNKS = (512, 2048, 8192)
STAGES_OF_A_LAYER = 4


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 512) for _ in range(length)]


LONG = prompt(LENGTH, 0)
MIXED = [prompt(length, length) for length in (1, 700, 17, TOPK, TOPK + 1, 301)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model without sparse attention."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(config))
    source = torch.Generator().manual_seed(0)
    layer, square = "model.layers.0", (64, 64)
    shapes = {"model.embed_tokens.weight": (512, 64), "model.norm.weight": (64,)}
    shapes |= {f"{layer}.{norm}.weight": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": square for part in "qkvo"}
    shapes |= {f"{layer}.mlp.{part}_proj.weight": square for part in ("gate", "up", "down")}
    weights = {name: torch.randn(shape, generator=source) * 0.05 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(run_jobs, tiny, llama, tmp_path_factory):
    """One child process: a model that is not DSA, the same prompt under three chunk sizes, mixed batches, refusals."""
    folder = tmp_path_factory.mktemp("traces")
    model = str(tiny)
    jobs = {"llama": {"model": str(llama), "batches": [[MIXED[1]]], "tokens": 2}}
    for chunk in CHUNKS:
        jobs[f"chunk {chunk}"] = {
            "model": model,
            "engine": {"max_num_batched_tokens": chunk},
            "batches": [[LONG]],
            "tokens": 8,
            "env": {"SPARSE_MLA_TRACE": str(folder / str(chunk))},
        }
    mixed = {"model": model, "engine": {"max_num_batched_tokens": 256}, "tokens": 6}
    jobs["mixed"] = {**mixed, "batches": [MIXED, *([one] for one in MIXED)]}
    cached = {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
    jobs["prefix cache"] = {
        "model": model,
        "engine": cached,
        "tokens": 6,
        "logprobs": False,
        "batches": [[MIXED[1]]] * 2,
    }
    for name, engine, env in (
        ("plain keys", {"max_num_batched_tokens": 512}, {"SPARSE_MLA_INDEX_KEYS": "plain"}),
        ("fp8 latent", {"kv_cache_dtype": "fp8_ds_mla", "dtype": "bfloat16"}, {}),
        ("fp8 tensor", {"kv_cache_dtype": "fp8"}, {}),
        ("no such schedule", {"hf_overrides": {"indexer_types": ["full", "shared", "full"]}}, {}),
        ("other backend", {"attention_backend": "FLASHMLA_SPARSE"}, {}),
    ):
        jobs[name] = {"model": model, "engine": engine, "batches": [[MIXED[5]]], "tokens": 2, "env": env}
    results, log = run_jobs(list(jobs.values()))
    return dict(zip(jobs, results, strict=True)), log, folder


def test_stock_vllm_refuses_and_off_leaves_its_error_alone(run_jobs, tiny):
    ((refused,), log) = run_jobs([{"model": str(tiny), "batches": [[MIXED[1]]], "tokens": 2}], SPARSE_MLA_VLLM="off")
    assert refused == {"error": REFUSAL}
    assert "Using sparse-mla" not in log


@pytest.mark.parametrize("chunk", CHUNKS)
def test_ours_serves_what_stock_refuses(served, chunk):
    results, _, _ = served
    ((answer,),) = results[f"chunk {chunk}"]["batches"]
    assert len(answer["tokens"]) == 8
    assert len(answer["prompt_logprobs"]) == LENGTH - 1


def test_one_line_says_what_was_chosen_and_why(served):
    _, log, _ = served
    first = next(line for line in log.splitlines() if "Using sparse-mla" in line)
    assert "attend eager (strict)" in first
    assert "latent plain[576 f32], index keys index_fp8[128 fp8]" in first
    assert "Sparse Attention is not supported on CPU." in first


def test_the_same_tokens_for_every_chunk_size(served):
    results, _, _ = served
    answers = [results[f"chunk {chunk}"]["batches"][0][0] for chunk in CHUNKS]
    assert answers[0]["tokens"] == answers[1]["tokens"] == answers[2]["tokens"]
    assert answers[0]["prompt_logprobs"] == answers[1]["prompt_logprobs"] == answers[2]["prompt_logprobs"]


def test_every_row_of_every_stage_hashes_the_same_for_every_chunk_size(served):
    _, _, folder = served
    traces = [trace.load(folder / str(chunk)) for chunk in CHUNKS]
    assert {key[2] for key in traces[0]} == set(trace.STAGES)
    assert len(traces[0]) == 3 * STAGES_OF_A_LAYER
    for key, rows in traces[0].items():
        assert sorted(rows) == list(range(LENGTH + 7)), key
        for other in traces[1:]:
            assert other[key] == rows, key


def test_chunked_prefill_was_really_chunked(served):
    """Else the tests above compare one thing with itself: without AMX vLLM switches chunking off for MLA models."""
    _, _, folder = served
    firsts = {}
    for chunk in CHUNKS:
        files = (folder / str(chunk)).iterdir()
        lines = [json.loads(line) for file in files for line in file.read_text(encoding="ascii").splitlines()]
        steps = {line["first"] for line in lines if line["stage"] == "output" and line["first"] < LENGTH}
        firsts[chunk] = sorted(steps)
    assert firsts == {chunk: list(range(0, LENGTH, chunk)) for chunk in CHUNKS}


def test_company_changes_nothing(served):
    results, _, _ = served
    together, *alone = results["mixed"]["batches"]
    for answer, (other,) in zip(together, alone, strict=True):
        assert answer["tokens"] == other["tokens"]
        assert answer["prompt_logprobs"] == pytest.approx(other["prompt_logprobs"], abs=1e-4)


def test_a_prompt_that_is_cached_gives_the_same_tokens(served):
    """Prefix caching, too, is off for MLA without AMX until the plugin restores what was asked for."""
    results, _, _ = served
    ((cold,), (warm,)) = results["prefix cache"]["batches"]
    assert (cold["cached"], warm["cached"]) == (0, 688)
    assert cold["tokens"] == warm["tokens"] == results["mixed"]["batches"][2][0]["tokens"]


@pytest.mark.parametrize("job", ["plain keys", "fp8 latent"])
def test_other_cache_formats_serve(served, job):
    results, _, _ = served
    ((answer,),) = results[job]["batches"]
    usual = results["mixed"]["batches"][6][0]
    assert len(answer["tokens"]) == 2
    mean = sum(answer["prompt_logprobs"]) / len(answer["prompt_logprobs"])
    assert mean == pytest.approx(sum(usual["prompt_logprobs"]) / len(usual["prompt_logprobs"]), abs=0.05)
    assert answer["prompt_logprobs"] != usual["prompt_logprobs"]


def test_an_unsupported_cache_dtype_is_refused_with_the_cure(served):
    results, _, _ = served
    error = results["fp8 tensor"]["error"]
    assert "--kv-cache-dtype  needs auto, bfloat16, float16, fp8_ds_mla, got fp8" in error
    assert "SPARSE_MLA_VLLM=off" in error


def test_a_schedule_that_vllm_reads_otherwise_is_refused(served):
    """vLLM ignores indexer_types: it would build an indexer that the checkpoint has no weights for."""
    results, _, _ = served
    error = results["no such schedule"]["error"]
    assert "vLLM built layer 1 otherwise than the config states" in error


def test_an_explicit_backend_is_never_answered_by_ours(served):
    results, _, _ = served
    assert results["other backend"] == {"error": REFUSAL}


def test_a_model_that_is_not_dsa_never_notices(served):
    results, _, _ = served
    assert "error" not in results["llama"]
    modules = set(results["llama"]["modules"])
    assert "sparse_mla.integrations.vllm.plugin" in modules
    needed = (
        "sparse_mla.attention",
        "sparse_mla.plan",
        "sparse_mla.backends",
        "sparse_mla.integrations.vllm.selection",
    )
    assert [name for name in modules if name.startswith(needed)] == []


def test_by_name_in_a_fresh_worker_process(run_jobs, tiny):
    """The engine's configuration crosses process borders before any plugin is loaded there."""
    job = {"model": str(tiny), "engine": {"attention_backend": "SPARSE_MLA"}, "batches": [[MIXED[2]]], "tokens": 2}
    ((result,), log) = run_jobs([job], VLLM_ENABLE_V1_MULTIPROCESSING="1", SPARSE_MLA_VLLM="fallback")
    assert "error" not in result
    assert "it was asked for by name" in log
