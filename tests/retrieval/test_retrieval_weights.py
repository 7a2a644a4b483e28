"""The sums that docs/retrieval-model.md states, and the files. Runs no model."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from sparse_mla.dims import MLADims
from sparse_mla.quantize import quantize_index_q
from sparse_mla.testing import retrieval, words
from sparse_mla.testing.planted import FACT_TOKENS, endpoint_style, plant, recalled, recite
from sparse_mla.verify.endpoint import style

LONGEST = 1 << 17


def digests(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_same_seed_writes_the_same_bytes_and_another_seed_another_model(tmp_path, model_folder):
    retrieval.write_retrieval_model(tmp_path / "again", index_topk=64)
    retrieval.write_retrieval_model(tmp_path / "other", seed=1, index_topk=64)
    assert digests(tmp_path / "again") == digests(model_folder)
    assert {name for name, digest in digests(tmp_path / "other").items() if digest != digests(model_folder)[name]} == {
        "model.safetensors"
    }


def test_the_folder_is_small_and_whole(model_folder):
    assert sum(file.stat().st_size for file in model_folder.iterdir()) < 16 << 20
    tensors = load_file(model_folder / "model.safetensors")
    for name, exact in retrieval.retrieval_weights().items():
        assert torch.allclose(tensors[name].float(), exact, rtol=2**-8, atol=0), name


def test_overrides_reach_the_config_and_the_config_is_read_as_it_is_meant(model_folder):
    dims = MLADims.from_config(model_folder)
    assert (dims.index_topk, dims.owns_indexer) == (64, (True, True, False))
    assert (dims.kv_lora_rank, dims.qk_rope_head_dim, dims.index_head_dim) == (512, 64, 128)


def test_two_codes_agree_to_at_most_a_quarter_so_one_mismatch_is_faint():
    codes = retrieval.retrieval_weights()["model.embed_tokens.weight"][:, : retrieval.CODE]
    products = (codes @ codes.T) / retrieval.CODE
    assert torch.equal(products.diagonal(), torch.ones(1024))
    products.fill_diagonal_(-1)
    assert products.max() == 0.25
    match = retrieval._MATCH_SHARPNESS * retrieval.CODE * (retrieval.NOPE + retrieval.ROPE) ** -0.5
    assert match * 0.75 > 13.8


def kernel(pairs: int) -> torch.Tensor:
    """Score of a constant vector with itself turned by rope over every distance, relative to distance 0."""
    frequencies = retrieval.THETA ** (-torch.arange(pairs, dtype=torch.float64) * 2 / retrieval.ROPE)
    return torch.cos(torch.arange(LONGEST)[:, None] * frequencies).mean(1)


def test_no_distance_up_to_the_longest_context_looks_like_the_right_one():
    scores = kernel(16)
    assert 1 - scores[1:].max() > 0.067
    logit = retrieval._ROPE_SHARPNESS * 16 * (retrieval.NOPE + retrieval.ROPE) ** -0.5
    assert logit * 0.067 > 19


def test_the_indexer_of_layer_0_keeps_the_neighbourhood_with_fp8_keys():
    indexer = retrieval.retrieval_weights()["model.layers.0.self_attn.indexer.k_norm.bias"]
    turned = torch.view_as_complex(indexer[:64].reshape(32, 2).double())
    frequencies = retrieval.THETA ** (-torch.arange(32, dtype=torch.float64) / 32)
    positions = torch.arange(0, LONGEST, dtype=torch.float64)
    keys = torch.view_as_real(
        turned * torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * frequencies)
    )
    coded, scale = quantize_index_q(torch.nn.functional.pad(keys.flatten(1), (0, 64)).float()[:, None], "fp8")
    values = coded.float()[:, 0] * scale
    for last in (1000, 20_000, LONGEST - 1):
        scores = values[: last + 1] @ values[last]
        ranks = scores.argsort(descending=True)[:32].tolist()
        assert {last, last - 1, last - 2, last - 3, last - 4} <= set(ranks)


def test_index_keys_of_layer_1_are_signs_that_fp8_keeps():
    weights = retrieval.retrieval_weights()
    hidden = torch.zeros(1024, retrieval.HIDDEN)
    codes = weights["model.embed_tokens.weight"][:, : retrieval.CODE]
    hidden[:, retrieval._BACK] = torch.stack([codes.roll(shift, 0) for shift in range(1, 5)], 1).flatten(1)
    indexer = "model.layers.1.self_attn.indexer."
    keys = torch.nn.functional.layer_norm(
        hidden @ weights[indexer + "wk.weight"].T, (128,), weights[indexer + "k_norm.weight"], eps=1e-6
    )
    coded, scale = quantize_index_q(keys[:, None], "fp8")
    assert torch.equal(coded.float()[:, 0, 64:] * scale, torch.cat((codes.roll(1, 0), codes.roll(2, 0)), 1))


def test_planted_prompts_have_their_length_and_their_facts_where_they_belong():
    planted = plant(4096, [0, 0.5, 1])
    assert len(planted.tokens) == 4096
    assert [fact.position for fact in planted.facts] == [0, (4096 - FACT_TOKENS) // 2 + 1, 4096 - FACT_TOKENS]
    for fact in planted.facts:
        assert planted.tokens[fact.position :][:FACT_TOKENS] == fact.tokens
        assert planted.prompt(fact) == [*planted.tokens, *fact.question]


def test_a_recital_has_its_length_and_tells_every_fact_twice():
    recital = recite(500, 4)
    assert len(recital.tokens) == 500
    for span in recital.spans:
        told = recital.tokens[span.start - 4 : span.stop]
        assert len(told) == FACT_TOKENS
        assert sum(recital.tokens[at : at + FACT_TOKENS] == told for at in range(500)) == 2
    assert recital.tokens[:FACT_TOKENS] == (*recital.tokens[-4:], *recital.answer[:-1])
    with pytest.raises(ValueError, match="overlap"):
        recite(100, 8)


def test_facts_that_would_overlap_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        plant(100, [0.5, 0.55])


def test_only_the_whole_answer_counts():
    facts = plant(200, [0, 1]).facts
    answers = [list(facts[0].answer), list(facts[1].answer[:-1])]
    assert recalled(facts, answers) == [True, False]


def test_the_vocabulary_is_full_and_every_merge_makes_a_token():
    files = words.tokenizer_files()
    vocabulary = files["tokenizer.json"]["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(1024))
    assert all(left + right in vocabulary for left, right in files["tokenizer.json"]["model"]["merges"])


def test_the_endpoint_style_is_one_that_verify_reads(tmp_path):
    (tmp_path / "style.json").write_text(json.dumps(endpoint_style()))
    read = style.load(str(tmp_path / "style.json"))
    [(name, value)] = read.pairs(1, __import__("random").Random(0))
    assert read.found(f" {value}.") == [value]
    assert len(name.split()) == 3
