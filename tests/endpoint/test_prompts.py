from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Model, Script

from sparse_mla.errors import NotCheckableError, UsageError
from sparse_mla.verify.endpoint.meters import IdMeter, TextMeter
from sparse_mla.verify.endpoint.outcome import StoppedError
from sparse_mla.verify.endpoint.prompts import Composer, Recipe, places, spread
from sparse_mla.verify.endpoint.session import Ledger
from sparse_mla.verify.endpoint.style import DEFAULT, load


def composer(meter, seed=1):
    return Composer(DEFAULT, meter, seed=seed, index_topk=512, chunk_tokens=None)


def id_meter(model):
    return IdMeter(lambda text, _special: model.tokenize(text), DEFAULT)


def text_meter(model):
    return TextMeter(lambda text: len(model.tokenize(text)) + 7, DEFAULT)


@pytest.mark.parametrize("split_digits", [False, True])
@pytest.mark.parametrize("length", [600, 1000, 1001, 1002, 1003, 4097, 20_000])
def test_token_and_text_prompts_have_the_exact_length(length, split_digits):
    model = Model(Script(split_digits=split_digits))
    (ids,) = composer(id_meter(model)).prompts(Recipe(key="a", length=length, nominal=length))
    assert len(ids.content) == length == ids.length
    (text,) = composer(text_meter(model)).prompts(Recipe(key="a", length=length, nominal=length))
    assert len(model.tokenize(text.content)) + 7 == length == text.length


def test_facts_stand_where_they_are_said_to_stand():
    model = Model(Script())
    (prompt,) = composer(id_meter(model)).prompts(Recipe(key="a", length=20_000, nominal=20_000))
    assert len(prompt.facts) == 12
    for fact in prompt.facts:
        around = model.text(prompt.content[fact.start : fact.start + 12])
        assert around.startswith(f" Record: the code of {fact.name} is {fact.value}.")
    starts = {fact.label: fact.start for fact in prompt.facts}
    assert starts["first"] < 64
    assert starts["last"] > 20_000 - 128
    assert starts["before last top-k"] < 20_000 - 512 - 64 < 20_000 - 512 + 64 < starts["in last top-k"]
    assert starts["chunk 8,192"] < 8192 < starts["chunk 8,192"] + 12
    assert prompt.asked == prompt.facts


def test_each_fact_can_be_asked_for_in_a_prompt_of_its_own():
    style = replace(DEFAULT, ask="each", question=" Code of {name}:")
    model = Model(Script())
    meter = IdMeter(lambda text, _special: model.tokenize(text), style)
    prompts = Composer(style, meter, seed=1, index_topk=512, chunk_tokens=None).prompts(
        Recipe(key="a", length=4000, nominal=4000)
    )
    assert len(prompts) == len(prompts[0].facts) == 12
    assert [prompt.asked for prompt in prompts] == [(fact,) for fact in prompts[0].facts]
    assert {len(prompt.content) for prompt in prompts} == {4000}
    for prompt in prompts:
        assert prompt.content[:3980] == prompts[0].content[:3980]
        assert model.text(prompt.content).endswith(f"Code of {prompt.asked[0].name}:")


def test_a_budget_holds_what_it_says_and_no_token_more():
    ledger = Ledger(100)
    ledger.prompt_tokens, ledger.completion_tokens = 50, 5
    ledger.reserve(40, 5)
    assert (ledger.prompt_tokens, ledger.completion_tokens, ledger.requests) == (90, 10, 1)
    for prompt, answer in ((1, 0), (0, 1)):
        with pytest.raises(StoppedError, match="may bring the total to 101"):
            ledger.reserve(prompt, answer)
    assert ledger.requests == 1
    Ledger(None).reserve(1 << 40, 1)


def test_a_new_seed_or_key_shares_no_page_and_a_repeated_one_is_the_same():
    model = Model(Script())
    first, again, other_key, other_seed = (
        composer(id_meter(model), seed).prompts(Recipe(key=key, length=1000, nominal=1000))[0]
        for seed, key in ((1, "a"), (1, "a"), (1, "b"), (2, "a"))
    )
    assert first == again
    assert first.sha256 == again.sha256
    for other in (other_key, other_seed):
        assert first.content[:16] != other.content[:16]
        assert not {fact.value for fact in first.facts} & {fact.value for fact in other.facts}


def test_a_shared_prefix_is_shared_to_about_the_half_and_the_rest_is_new():
    model = Model(Script())
    compose = composer(id_meter(model)).prompts
    (first,) = compose(Recipe(key="a", length=4000, nominal=4000))
    (second,) = compose(Recipe(key="a", length=3999, nominal=4000, tail_key="b"))
    common = next(at for at, (x, y) in enumerate(zip(first.content, second.content, strict=False)) if x != y)
    assert 1200 < common < 2100
    assert len(second.content) == 3999
    old, new = ({fact.value for fact in prompt.facts if fact.start > 2000} for prompt in (first, second))
    assert old
    assert new
    assert not old & new
    assert len({fact.name for fact in second.facts}) == len(second.facts)


def test_words_of_several_tokens_are_counted_and_not_trusted():
    meter = TextMeter(len, DEFAULT)  # a token for each letter: words of one group cost the same
    assert meter.filler == DEFAULT.filler[0]
    (prompt,) = composer(meter).prompts(Recipe(key="a", length=3000, nominal=3000))
    assert 3000 - 4 < prompt.length == len(prompt.content) <= 3000
    by_letters = IdMeter(lambda text, _special: list(text.encode()), DEFAULT)
    (prompt,) = composer(by_letters).prompts(Recipe(key="a", length=3001, nominal=3001))
    assert len(prompt.content) == 3001


def test_only_words_that_are_single_tokens_become_filler():
    model = Model(Script())
    split = [word for group in DEFAULT.filler for word in group if word[0] in "aeioust"]

    def count(text):
        return len(model.tokenize(text)) + sum(text.split().count(word) for word in split)

    meter = TextMeter(count, DEFAULT)
    assert len(meter.filler) >= 8
    assert not set(meter.filler) & set(split)
    (prompt,) = composer(meter).prompts(Recipe(key="a", length=3000, nominal=3000))
    assert count(prompt.content) == 3000


def test_a_tokenizer_that_knows_no_filler_word_is_refused():
    with pytest.raises(UsageError, match="--style"):
        IdMeter(lambda text, _special: [0] * len(text.split()), DEFAULT)
    with pytest.raises(NotCheckableError, match="--style"):
        TextMeter(lambda _text: 5, DEFAULT)


def test_special_tokens_come_first_and_only_once():
    model = Model(Script())
    meter = IdMeter(lambda text, special: [9999] * special + model.tokenize(text), DEFAULT)
    (prompt,) = composer(meter).prompts(Recipe(key="a", length=1000, nominal=1000))
    assert prompt.content[0] == 9999
    assert prompt.content.count(9999) == 1
    assert len(prompt.content) == 1000


def test_too_short_a_length_says_what_it_needs():
    with pytest.raises(UsageError, match=r"--lengths: needs at least \d+ tokens .* got 50"):
        composer(id_meter(Model(Script()))).prompts(Recipe(key="a", length=50, nominal=50))


@given(st.integers(0, 3000), st.lists(st.integers(1, 40), min_size=3, max_size=12), st.data())
def test_spread_fills_exactly_and_in_order(filler, costs, data):
    length = sum(costs) + filler
    facts = len(costs) - 2
    wants = sorted(data.draw(st.lists(st.integers(0, length + 50), min_size=facts, max_size=facts)))
    starts, gaps = spread(length, costs, wants)
    assert sum(gaps) + sum(costs) == length
    assert min(gaps) >= 0
    ends = [start + cost for start, cost in zip(starts, costs[1:-1], strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert all(start >= costs[0] for start in starts)


@given(st.integers(200, 200_000), st.integers(2, 60), st.sampled_from([64, 512, 2048]), st.sampled_from([512, 8192]))
def test_places_never_overlap(length, fact_tokens, index_topk, chunk):
    starts = sorted(start for _, start in places(length, fact_tokens, index_topk, chunk))
    assert all(second - first >= 2 * fact_tokens for first, second in itertools.pairwise(starts))
    labels = [label for label, _ in places(length, fact_tokens, index_topk, chunk)]
    assert labels[:2] == ["first", "last"]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ("amber: 123456\nlion: 654321", ["123456", "654321"]),
        ("123,456 and 654,321", ["123456", "654321"]),
        ("123456,654321", ["123456", "654321"]),
        ("1234567 12345 the 123456th", ["123456"]),
        ("123,456,789", []),
        ("!!!!!!!!!!", []),
    ],
)
def test_values_are_read_as_whole_numbers(answer, values):
    assert DEFAULT.found(answer) == values


def test_a_style_file_replaces_words_and_is_checked(tmp_path):
    file = tmp_path / "style.json"
    words = [f"w{number}" for number in range(40)]
    style = {
        "preamble": "{nonce}", "fact": " {name}: {value}.", "question": " {name}:", "ask": "each",
        "names": words[:10], "values": words[10:30], "filler": words[30:],
    }  # fmt: skip
    file.write_text(json.dumps(style))
    loaded = load(str(file))
    assert loaded.filler == (tuple(words[30:]),)
    assert loaded.found("w11 x w5, w12.") == ["w11", "w12"]
    pairs = loaded.pairs(10, random.Random(0))
    assert len({value for _, value in pairs}) == 10
    for wrong in ({"ask": "some"}, {"fact": "no place"}, {"names": "text"}, {"colour": 1}, {"digits": "6"}, []):
        file.write_text(json.dumps({**style, **wrong} if isinstance(wrong, dict) else wrong))
        with pytest.raises(UsageError, match="--style"):
            load(str(file))
    with pytest.raises(UsageError, match="--style"):
        load(str(tmp_path / "missing.json"))
