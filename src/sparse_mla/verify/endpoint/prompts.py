"""Prompts of exact token length with facts at known depths.

A prompt is: preamble with a nonce, then facts with filler between them, then the question. The fixed parts are counted
by the server; filler words have a measured number of tokens, so the length is exact by addition and is checked against
the server's count in every answer.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .style import Style

MOST_FACTS = 12
NONCE_WORDS = 8
LIKELY_CHUNK = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A planted fact; ``start`` is the position of its first token (about, where only text can be sent)."""

    name: str
    value: str
    label: str
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """``length`` tokens in all; ``asked`` are the facts whose values the answer must hold, and no others."""

    content: str | list[int]
    length: int
    facts: tuple[Fact, ...]
    asked: tuple[Fact, ...]

    @property
    def sha256(self) -> str:
        """Hash of the text or of the token ids."""
        return hashlib.sha256(json.dumps(self.content, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What decides a prompt, with the seed.

    Attributes:
        key: seeds nonce, facts and filler.
        length: tokens in all.
        nominal: length that places the facts; differs from ``length`` where two prompts must begin alike.
        tail_key: seeds all that lies in the second half instead, for a prompt that shares its first half; or empty.
        most_facts: upper bound.
    """

    key: str
    length: int
    nominal: int
    tail_key: str = ""
    most_facts: int = MOST_FACTS


class Meter(Protocol):
    """Knows the tokens of text on one server."""

    filler: tuple[str, ...]

    def costs(self, parts: Sequence[str]) -> list[int]:
        """Tokens of each part of a prompt made of these parts; the sum is exact."""

    def assemble(
        self, parts: Sequence[str], gaps: Sequence[int], word: Callable[[int], str]
    ) -> tuple[str | list[int], int]:
        """The prompt with ``gaps[i]`` tokens of filler after part i, and its length; ``word(i)`` draws filler."""


class Composer:
    """Makes prompts in one style with one seed."""

    def __init__(self, style: Style, meter: Meter, *, seed: int, index_topk: int, chunk_tokens: int | None) -> None:
        self._style, self._meter, self._seed = style, meter, seed
        self._index_topk, self._chunk = index_topk, chunk_tokens or LIKELY_CHUNK
        sample = self._parts(style.pairs(4, random.Random(0)), style.filler[0][:NONCE_WORDS], None)
        self.fixed_tokens = sum(meter.costs(sample))
        self._fact_tokens = max(meter.costs(sample)[1:-1])

    def prompts(self, recipe: Recipe) -> tuple[Prompt, ...]:
        """One prompt, or one for each fact where the style asks so.

        Raises:
            UsageError: the length has no room for four facts.
        """
        wants = self._wants(recipe)
        source = random.Random(f"{self._seed}/{recipe.key}")
        nonce = source.choices(self._meter.filler, k=NONCE_WORDS)
        pairs = self._pairs(recipe, wants, source)
        if self._style.ask == "all":
            return (self._prompt(recipe, wants, nonce, pairs, None),)
        return tuple(self._prompt(recipe, wants, nonce, pairs, index) for index in range(len(pairs)))

    def facts_of(self, length: int) -> int:
        """Number of facts in a prompt of this length."""
        return len(self._wants(Recipe(key="", length=length, nominal=length)))

    def _wants(self, recipe: Recipe) -> list[tuple[str, int]]:
        room = (recipe.length - self.fixed_tokens) // (2 * self._fact_tokens) + 4
        most = min(recipe.most_facts, self._style.most_facts, room)
        if most < 4:
            needs = f"at least {self.fixed_tokens} tokens for this style and tokenizer"
            raise UsageError("--lengths", needs=needs, got=recipe.length)
        wants = places(recipe.nominal, self._fact_tokens, self._index_topk, self._chunk)
        return sorted(wants[:most], key=lambda want: want[1])

    def _pairs(self, recipe: Recipe, wants: list[tuple[str, int]], source: random.Random) -> list[tuple[str, str]]:
        pairs = self._style.pairs(len(wants), source)
        if not recipe.tail_key:
            return pairs
        kept = [pair for pair, (_, start) in zip(pairs, wants, strict=True) if start < recipe.nominal // 2]
        taken = {word for pair in kept for word in pair}
        pool = self._style.pairs(
            min(2 * len(wants), self._style.most_facts), random.Random(f"{self._seed}/{recipe.tail_key}")
        )
        fresh = [pair for pair in pool if not taken & set(pair)]
        return (kept + fresh)[: len(wants)]

    def _prompt(
        self,
        recipe: Recipe,
        wants: list[tuple[str, int]],
        nonce: Sequence[str],
        pairs: list[tuple[str, str]],
        index: int | None,
    ) -> Prompt:
        wants = wants[: len(pairs)]
        parts = self._parts(pairs, nonce, index)
        costs = self._meter.costs(parts)
        starts, gaps = spread(recipe.length, costs, [start for _, start in wants])
        sources = [random.Random(f"{self._seed}/{self._half(recipe, want)}/{i}") for i, want in enumerate(wants)]
        sources.append(random.Random(f"{self._seed}/{recipe.tail_key or recipe.key}/end"))
        filler = self._meter.filler
        content, length = self._meter.assemble(parts, gaps, lambda gap: sources[gap].choice(filler))
        facts = tuple(
            Fact(name=name, value=value, label=label, start=start)
            for (name, value), (label, _), start in zip(pairs, wants, starts, strict=True)
        )
        return Prompt(content=content, length=length, facts=facts, asked=facts if index is None else (facts[index],))

    @staticmethod
    def _half(recipe: Recipe, want: tuple[str, int]) -> str:
        return recipe.tail_key if recipe.tail_key and want[1] >= recipe.nominal // 2 else recipe.key

    def _parts(self, pairs: Sequence[tuple[str, str]], nonce: Sequence[str], index: int | None) -> list[str]:
        style = self._style
        question = style.question.replace("{names}", ", ".join(name for name, _ in pairs))
        question = question.replace("{name}", pairs[index or 0][0])
        facts = [style.fact.replace("{name}", name).replace("{value}", value) for name, value in pairs]
        return [style.preamble.replace("{nonce}", " ".join(nonce)), *facts, question]


def places(length: int, fact_tokens: int, index_topk: int, chunk: int) -> list[tuple[str, int]]:
    """(label, wanted start) of every place worth a fact, the most telling first, none upon another.

    First and last page; either side of the last ``index_topk`` tokens (with room for the answer, which moves that
    window); across chunk boundaries; evenly in between.
    """
    slack = max(2 * fact_tokens, min(256, index_topk // 4))
    wants = [("first", 0), ("last", length)]
    if length > index_topk + 4 * slack:
        edge = length - index_topk
        wants += [("before last top-k", edge - slack - fact_tokens), ("in last top-k", edge + slack)]
    boundaries = range(chunk, length - fact_tokens, chunk)
    chosen = {boundaries[0], boundaries[len(boundaries) // 2], boundaries[-1]} if boundaries else set()
    wants += [("50 %", length // 2)]
    wants += [(f"chunk {boundary:,}", boundary - fact_tokens // 2) for boundary in sorted(chosen)]
    wants += [(f"{percent} %", length * percent // 100) for percent in (10, 90, 30, 70, 20, 80, 40, 60)]
    kept: list[tuple[str, int]] = []
    for label, start in wants:
        if all(abs(start - other) >= 2 * fact_tokens for _, other in kept):
            kept.append((label, start))
    return kept


def spread(length: int, costs: Sequence[int], wants: Sequence[int]) -> tuple[list[int], list[int]]:
    """Starts of the facts, and tokens of filler before each and before the question.

    ``costs`` are those of the preamble, of each fact and of the question; ``wants`` are ascending.
    """
    left = length - sum(costs)
    cursor = costs[0]
    starts, gaps = [], []
    for want, cost in zip(wants, costs[1:-1], strict=True):
        gap = min(max(want - cursor, 0), left)
        gaps.append(gap)
        starts.append(cursor + gap)
        cursor += gap + cost
        left -= gap
    return starts, [*gaps, left]
