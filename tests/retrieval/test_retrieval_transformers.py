"""The model in stock Transformers: it answers through its sparse attention, and nothing else can answer for it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sparse_mla.testing import retrieval, words
from sparse_mla.testing.planted import ANSWER_TOKENS, plant, recalled

transformers = pytest.importorskip("transformers")

LENGTH, TOPK = 2048, 64
DEPTHS = [step / 8 for step in range(9)]
PLANTED = plant(LENGTH, DEPTHS, seed=3)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(model_folder):
    return transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return transformers.AutoTokenizer.from_pretrained(model_folder)


def hits(model, facts=PLANTED.facts):
    """Facts are asked over one reading of the prompt, as a server with a prefix cache would."""
    with torch.inference_mode():
        read = model(torch.tensor([PLANTED.tokens]), use_cache=True, logits_to_keep=1).past_key_values
        answers = []
        for fact in facts:
            pending, said = list(fact.question), []
            while len(said) < ANSWER_TOKENS:
                logits = model(torch.tensor([pending]), past_key_values=read, use_cache=True).logits
                pending = [int(logits[0, -1].argmax())]
                said += pending
            read.crop(LENGTH - read.get_seq_length())
            answers.append(said)
    return recalled(facts, answers)


@contextlib.contextmanager
def zeroed(weight, rows):
    before = weight.detach().clone()
    with torch.no_grad():
        weight[rows] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)


def test_every_fact_is_recalled_at_32_times_index_topk(model):
    assert 32 * model.config.index_topk == LENGTH
    assert all(hits(model))


def test_in_bfloat16_too(model_folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    assert all(hits(model))


def test_with_the_last_tokens_alone_only_the_last_fact_is(model, monkeypatch):
    def last(self, hidden, query, embeddings, mask, positions, past_key_values):
        past_key_values.update_indexer(hidden.new_zeros(1, hidden.shape[1], 1), self.layer_idx)
        newest = torch.arange(mask.shape[-1] - hidden.shape[1], mask.shape[-1])
        return (newest[:, None] - torch.arange(self.index_topk)).clamp(min=0)[None]

    monkeypatch.setattr(type(model.model.layers[0].self_attn.indexer), "forward", last)
    assert hits(model) == [False] * 8 + [True]


def test_with_every_token_all_facts_are(model, monkeypatch):
    for layer in model.model.layers[:2]:
        monkeypatch.setattr(layer.self_attn.indexer, "index_topk", LENGTH + ANSWER_TOKENS + 4)
    assert all(hits(model))


@pytest.mark.parametrize(("layer", "head"), [(0, 0), *((layer, head) for layer in (1, 2) for head in range(4))])
def test_no_head_that_finds_or_fetches_can_be_missed(model, layer, head):
    weight = model.model.layers[layer].self_attn.o_proj.weight
    own = slice(head * retrieval.CODE, (head + 1) * retrieval.CODE)
    with zeroed(weight, (slice(None), own)):
        assert not any(hits(model, PLANTED.facts[:2]))


def test_the_tokenizer_keeps_any_text_and_makes_one_token_of_a_word(tokenizer):
    text = " fomu lezo: Grüße, 你好 58213.\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer("".join(words.WORDS)).input_ids == list(map(words.word_id, words.WORDS))


def test_the_chat_template_ends_where_the_question_does(tokenizer):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b:"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "a\nb:"


def test_an_answer_ends_with_the_end_token(model, tokenizer):
    prompt = "".join(words.WORDS[:300]) + " the code is 4711. Well" + "".join(words.WORDS[300:400]) + " the code is"
    answer = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=16, do_sample=False)[0]
    assert tokenizer.decode(answer).endswith(" the code is 4711.<|end|>")
