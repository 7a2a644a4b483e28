"""Rows of a call that one kernel serves: a request with few query tokens is decoding, others are prefilling."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .tuning import DECODE_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...batch import BatchLayout


class Run(NamedTuple):
    """Rows [start, stop); ``prefill`` where they may be reduced in another order than in decode."""

    start: int
    stop: int
    prefill: bool


def runs(batch: BatchLayout, *, one_order: bool = False) -> Iterator[Run]:
    """Cut a batch into runs of neighbouring requests of one kind; padding rows join the last.

    With ``one_order`` all are taken for decoding: where prefill would reduce in another order.
    """
    start = stop = 0
    prefill = False
    for length in batch.query_lens:
        wanted = length > DECODE_THRESHOLD and not one_order
        if length and wanted != prefill:
            if stop > start:
                yield Run(start, stop, prefill)
            start, prefill = stop, wanted
        stop += length
    if batch.num_tokens > start:
        yield Run(start, batch.num_tokens, prefill)


def requests_per_tile(query_lens: tuple[int, ...], run: Run, rows: int) -> int:
    """The most requests whose tokens meet in one tile of ``rows`` rows, counted from the start of a run."""
    most, start = 1, 0
    here: dict[int, int] = {}
    for length in query_lens:
        first, last = max(start, run.start) - run.start, min(start + length, run.stop) - run.start - 1
        if first <= last:
            for tile in {first // rows, last // rows}:
                here[tile] = here.get(tile, 0) + 1
                most = max(most, here[tile])
        start += length
    return most + (start < run.stop)  # padding at the end may share the last tile
