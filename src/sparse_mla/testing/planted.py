"""Prompts for the retrieval model, in token ids: random words with facts among them, and how answers are judged.

A fact reads `` bado kite luma: rofi sane gupo tevi.``; the question is its key, `` bado kite luma:``, at the end of the
prompt; the answer is the rest, up to the full stop, and the end token. Key and value come from the words of the filler.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .words import ASK, END, STOP, WORDS, word_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

KEY_WORDS = 3
VALUE_WORDS = 4
FACT_TOKENS = KEY_WORDS + 1 + VALUE_WORDS + 1
ANSWER_TOKENS = VALUE_WORDS + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """``question`` and ``answer`` in token ids; the fact's first token stands at ``position``."""

    position: int
    question: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """The fact as it stands in the prompt: without the end token of the answer."""
        return self.question + self.answer[:-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planted:
    """A prompt of exactly the length asked for, without any question, and the facts in it."""

    tokens: tuple[int, ...]
    facts: tuple[Fact, ...]

    def prompt(self, fact: Fact) -> list[int]:
        """The prompt that asks for a fact: all of them share the first ``len(tokens)`` tokens."""
        return [*self.tokens, *fact.question]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recital:
    """A prompt that tells its facts twice: where they are planted, and one after the other at its end.

    Attributes:
        spans: for each fact but the first, the positions at which its answer stands the second time, without the end
            token. A model that knows the fact expects each of these tokens more than any other.
        answer: what a model that knows the first fact, whose question ends the prompt, says next.
    """

    tokens: tuple[int, ...]
    spans: tuple[range, ...]
    answer: tuple[int, ...]


def recite(length: int, facts: int, *, seed: int = 0) -> Recital:
    """A recital of exactly ``length`` tokens, its facts evenly planted from the first token on.

    Raises:
        ValueError: facts would overlap, or there is no room for them.
    """
    question = KEY_WORDS + 1
    planted = plant(length - (facts - 1) * FACT_TOKENS - question, [step / facts for step in range(facts)], seed=seed)
    tokens, spans = list(planted.tokens), []
    for fact in planted.facts[1:]:
        spans.append(range(len(tokens) + question, len(tokens) + FACT_TOKENS))
        tokens += fact.tokens
    first = planted.facts[0]
    return Recital(tokens=(*tokens, *first.question), spans=tuple(spans), answer=first.answer)


def plant(length: int, depths: Sequence[float], *, seed: int = 0) -> Planted:
    """Random words with one fact at each depth: 0 is the very start, 1 the very end.

    Raises:
        ValueError: facts would overlap.
    """
    source = random.Random(seed)
    tokens = [word_id(word) for word in source.choices(WORDS, k=length)]
    places = [round(depth * (length - FACT_TOKENS)) for depth in depths]
    ordered = sorted(places)
    if any(after - before < FACT_TOKENS for before, after in pairwise(ordered)):
        raise ValueError(f"{len(places)} facts of {FACT_TOKENS} tokens overlap in {length} tokens")
    facts = []
    for place in places:
        key, value = source.sample(WORDS, KEY_WORDS), source.sample(WORDS, VALUE_WORDS)
        question = tuple(map(word_id, [*key, ASK]))
        fact = Fact(position=place, question=question, answer=tuple(map(word_id, [*value, STOP, END])))
        tokens[place : place + FACT_TOKENS] = fact.tokens
        facts.append(fact)
    return Planted(tokens=tuple(tokens), facts=tuple(facts))


def recalled(facts: Sequence[Fact], answers: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each answer is the fact's, token by token; nothing else counts."""
    return [tuple(answer) == fact.answer for fact, answer in zip(facts, answers, strict=True)]


def endpoint_style() -> dict[str, Any]:
    """How ``verify --endpoint --style`` plants facts for this model: keys of three words, values of one word."""
    words = [word.strip() for word in WORDS]
    names = [" ".join(words[start : start + KEY_WORDS]) for start in range(0, 64 * KEY_WORDS, KEY_WORDS)]
    return {
        "preamble": "{nonce}",
        "fact": f" {{name}}{ASK} {{value}}{STOP}",
        "question": f" {{name}}{ASK}",
        "ask": "each",
        "names": names,
        "values": words[64 * KEY_WORDS : 64 * KEY_WORDS + 128],
        "filler": words,
        "stop": [STOP],
    }
