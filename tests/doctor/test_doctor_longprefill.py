"""The long-prefill chain: what it computes, and what it says of sources with each of the known causes."""

from __future__ import annotations

import pytest

from sparse_mla.doctor.candidates import Offer, Offers
from sparse_mla.doctor.longprefill import CAUSES, follow, remedies, steps
from sparse_mla.engine_source.audit import Probe

FACTS = {
    "vendor": "amd",
    "arch": "gfx950",
    "engine": "vllm",
    "dsa": True,
    "version:vllm": "0.23.0",
    "max_num_batched_tokens": 8192,
}
ONLY = Offers(
    arch="gfx950",
    how="read",
    backends=(Offer(name="ROCM_AITER_MLA_SPARSE", status="valid", reasons=(), conditions=()),),
    indexer=None,
    notes=(),
)


def probes(**statuses):
    return {
        name: Probe(id=name, status=statuses.get(name.replace("-", "_"), "sound"), where="", what="") for name in CAUSES
    }


@pytest.mark.parametrize(
    ("chunk", "budget", "subchunk", "third"),
    [(8192, 512, 16385, 16385), (16384, 512, 8193, 32769), (32768, 512, 4097, 65537), (8192, 8192, 262145, 16385), (12288, 512, 10923, 24577)],
)  # fmt: skip
def test_thresholds_are_computed(chunk, budget, subchunk, third):
    chain = follow({**FACTS, "max_num_batched_tokens": chunk, "logits_mb": budget}, None, None)
    assert chain.max_scores == budget * 2**20 // 4
    assert (chain.subchunk_from, chain.third_chunk_from) == (subchunk, third)
    # The onset is exact: one token less still fits.
    assert chunk * (subchunk - 1) <= chain.max_scores < chunk * subchunk


def test_default_budget_is_a_power_of_two_of_scores():
    assert follow(FACTS, None, None).max_scores == 134_217_728


@pytest.mark.parametrize(
    ("chunk", "prompt", "chunks"),
    [(8192, 22000, 3), (12288, 22000, 2), (21504, 22000, 2), (12288, 33000, 3), (8192, 100, 1)],
)
def test_chunk_count_is_what_matters(chunk, prompt, chunks):
    chain = follow({**FACTS, "max_num_batched_tokens": chunk, "prompt_tokens": prompt}, probes(plan_key="faulty"), ONLY)
    assert chain.num_chunks == chunks
    assert (prompt >= chain.third_chunk_from) == (chunks >= 3)


def test_max_model_len_stands_in_for_the_prompt():
    assert follow({**FACTS, "max_model_len": 65536}, None, None).num_chunks == 8
    assert follow(FACTS, None, None).num_chunks is None


def test_faulty_source():
    chain = follow({**FACTS, "prompt_tokens": 23398}, probes(plan_key="faulty", gather_skip="faulty"), ONLY)
    assert chain.only_candidate is True
    assert chain.wrong == ("plan-key",)
    assert chain.safe_tokens == 16384
    text = "\n".join(steps(chain))
    assert "the only candidate" in text
    assert "3 chunks" in text
    ways = remedies(chain)
    assert [way.approximate for way in ways] == [False, False, False, True]
    assert "--max-model-len 16384" in ways[2].command
    assert "right only up to index_topk" in ways[3].do


def test_gathering_twice_is_no_cause_of_wrong_output():
    chain = follow({**FACTS, "prompt_tokens": 23398}, probes(gather_skip="faulty"), ONLY)
    assert chain.wrong == ()
    assert not chain.suspect
    assert remedies(chain) == ()
    assert chain.safe_tokens is None


@pytest.mark.parametrize(
    ("arch", "chunk", "safe"), [("gfx950", 8192, 16384), ("gfx950", 32768, 4096), ("gfx942", 8192, 0)]
)
def test_code_of_the_first_report_is_suspect(arch, chunk, safe):
    """Its cause stands in compiled operators; what is on record is offered, and called that."""
    facts = {**FACTS, "arch": arch, "max_num_batched_tokens": chunk, "prompt_tokens": 23398}
    chain = follow(facts, probes(scratch_reserved="faulty", gather_skip="faulty", cache_layout="absent"), ONLY)
    assert chain.wrong == ()
    assert chain.suspect
    assert chain.safe_tokens == safe
    assert "on record" in steps(chain)[-1]
    texts = [way.do for way in remedies(chain)]
    assert any("reported, not proved" in text for text in texts) == (safe > 0)


def test_layout_matters_at_block_size_one_only():
    faulty = probes(cache_layout="faulty")
    assert follow({**FACTS, "block_size": 1}, faulty, ONLY).safe_tokens == 0
    assert follow({**FACTS, "block_size": 64}, faulty, ONLY).wrong == ()


@pytest.mark.parametrize(
    ("model_type", "possible", "says"),
    [
        ("glm_moe_dsa", False, "no work-around"),
        ("deepseek_v32", True, "allows it"),
        (None, None, "deepseek_v32 model only"),
    ],
)
def test_dense_is_judged_by_the_model(model_type, possible, says):
    chain = follow({**FACTS, "model_type": model_type}, probes(plan_key="faulty"), ONLY)
    assert chain.dense_possible is possible
    assert says in remedies(chain)[-1].do
    assert remedies(chain)[-1].approximate


@pytest.mark.parametrize("change", [{"vendor": "nvidia"}, {"dsa": False}, {"engine": "sglang"}])
def test_other_settings_have_no_chain(change):
    assert follow({**FACTS, **change}, None, None) is None


def test_unread_source_is_said_to_be_unread():
    chain = follow(FACTS, None, None)
    assert set(chain.causes.values()) == {"not read"}
    assert chain.only_candidate is None
    assert "not read" in "\n".join(steps(chain))
