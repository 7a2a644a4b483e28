"""How a prompt is cut into calls, and which of its query tokens are looked at. Whole numbers only; no torch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..backends.triton.tuning import DECODE_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MARGIN = 8
"""Query tokens looked at on each side of a boundary."""
_EXTENDS = (65, 64, 33, 16, 7, 5, 3, 2, 1)
"""Calls of the extends plan: around the tile sizes of kernels and the small shapes where libraries change path."""
_RAGGED_CUTS = 6
_MOST_JUDGED = 60
"""Chunk boundaries at most on both sides of which the reference judges: at a million tokens a row takes it 0.1 s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkPlan:
    """One way to compute a prompt and the tokens decoded after it.

    Attributes:
        ends: end position of each call; the calls cover the prompt and the decoded tokens.
        fresh: a new operator object and workspace for each call instead of one that lives long.
        beside: calls also hold a few query tokens of another request, in front.
    """

    name: str
    ends: tuple[int, ...]
    fresh: bool = False
    beside: bool = False

    def calls(self) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` of each call."""
        return pairwise((0, *self.ends))

    def locate(self, position: int) -> str:
        """Where a position falls, for messages."""
        for number, (start, stop) in enumerate(self.calls(), 1):
            if position < stop:
                return f"call {number} of {len(self.ends)}, its token {position - start}"
        return "no call"


def chunk_plans(
    length: int, decoded: int, chunk_tokens: Sequence[int], *, seed: int, strict: bool
) -> tuple[ChunkPlan, ...]:
    """The plans for a prompt of ``length`` tokens with ``decoded`` single-token calls after it.

    Args:
        chunk_tokens: sizes of uniform plans; those that would cut nothing are left out. The first is also run with
            fresh objects, the second beside another request.
        strict: prefill and decode are promised equal in bits. If not, every plan decodes token by token and none has
            calls of at most DECODE_THRESHOLD tokens, since those may be computed as decode.
    """
    source = random.Random(f"ragged {seed} {length}")
    tail = tuple(range(length + 1, length + decoded + 1))
    whole = (length + decoded,) if strict else (length, *tail)
    plans = [ChunkPlan(name="one call", ends=whole)]
    for number, size in enumerate(size for size in chunk_tokens if size < length):
        ends = (*_apart(range(size, length, size), length, strict=strict), length, *tail)
        plans.append(ChunkPlan(name=f"{size:,} tokens", ends=ends, beside=number == 1))
        if number == 0:
            plans.append(ChunkPlan(name=f"{size:,} tokens, fresh objects", ends=ends, fresh=True))
    cuts = source.sample(range(1, length), min(_RAGGED_CUTS, length - 1))
    plans.append(ChunkPlan(name="ragged", ends=(*_apart(sorted(cuts), length, strict=strict), length, *tail)))
    if strict:
        plans.append(ChunkPlan(name="short extends", ends=(*_extend_ends(length), length, *tail)))
    return tuple(plans)


def _apart(cuts: Iterable[int], length: int, *, strict: bool) -> Iterator[int]:
    """The cuts of a prompt, in fast mode without those that would leave a call of too few tokens."""
    least, end = 1 if strict else DECODE_THRESHOLD + 1, 0
    for cut in cuts:
        if cut - end >= least and length - cut >= least:
            yield cut
            end = cut


def _extend_ends(length: int) -> list[int]:
    """Ends of the calls before the last one: a long prefix, then ever shorter extensions up to ``length``."""
    ends, end = [], length
    for size in reversed(_EXTENDS):
        end -= size
        if end <= 0:
            break
        ends.append(end)
    return ends[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Query tokens of a case by position, ascending.

    Attributes:
        query: computed and hashed, the same in every plan.
        reference: judged by the reference; a subset of ``query``.
        pages: the page boundaries that were drawn.
        complete: ``query`` holds every token.
    """

    query: tuple[int, ...]
    reference: tuple[int, ...]
    pages: tuple[int, ...]
    complete: bool


def query_rows(
    plans: Iterable[ChunkPlan],
    *,
    topk: int,
    block_size: int,
    seed: int,
    pages: int,
    sampled: int,
    referenced: int,
    complete: bool,
    strict: bool,
) -> Rows:
    """Rows around each chunk boundary of each plan, around index_topk, around drawn page boundaries, and drawn ones.

    Args:
        pages, sampled: how many page boundaries and how many further rows are drawn from ``seed``.
        referenced: how many of each of those two the reference judges too.
        complete: look at every row; the reference's rows stay the same.
        strict: if not, so many rows follow each boundary that no call is left with few enough to count as decode.
    """
    ends = {end for plan in plans for end in plan.ends}
    total = max(ends)
    source = random.Random(f"rows {seed} {total}")
    boundaries = sorted(ends | {topk})
    possible = range(block_size, total, block_size)
    drawn_pages = source.sample(possible, min(pages, len(possible)))
    after = MARGIN if strict else DECODE_THRESHOLD + 1
    looked_at = boundaries if strict else [0, *boundaries]
    near = {row for edge in (*looked_at, *drawn_pages) for row in range(edge - MARGIN, edge + after)}
    query = {row for row in near if 0 <= row < total} | {0, total - 1}
    others = sorted(set(range(total)) - query) if total <= 4 * sampled else _draw(source, total, query, sampled)
    drawn = source.sample(others, min(sampled, len(others)))
    query.update(drawn)
    edges = (*_spread(sorted(ends), _MOST_JUDGED), topk, *drawn_pages[:referenced])
    sides = {row for edge in edges for row in (edge - 1, edge)}
    reference = {row for row in sides if 0 <= row < total} | {0, total - 1, *drawn[:referenced]}
    return Rows(
        query=tuple(range(total)) if complete else tuple(sorted(query)),
        reference=tuple(sorted(reference)),
        pages=tuple(sorted(drawn_pages)),
        complete=complete or len(query) == total,
    )


def _spread(ends: list[int], most: int) -> list[int]:
    """``most`` of ``ends``, spread evenly, with the first and the last."""
    if len(ends) <= most:
        return ends
    return [ends[number * (len(ends) - 1) // (most - 1)] for number in range(most)]


def _draw(source: random.Random, total: int, taken: set[int], count: int) -> list[int]:
    """``count`` positions outside ``taken``, or all that are left, without listing all of them."""
    drawn: set[int] = set()
    while len(drawn) < min(count, total - len(taken)):
        row = source.randrange(total)
        if row not in taken:
            drawn.add(row)
    return sorted(drawn)
