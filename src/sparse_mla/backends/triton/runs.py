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


def runs(batch: BatchLayout, *, strict: bool) -> Iterator[Run]:
    """Cut a batch into runs of neighbouring requests of one kind; padding rows join the last. In strict mode all decode."""
    start = stop = 0
    prefill = False
    for length in batch.query_lens:
        wanted = length > DECODE_THRESHOLD and not strict
        if length and wanted != prefill:
            if stop > start:
                yield Run(start, stop, prefill)
            start, prefill = stop, wanted
        stop += length
    if batch.num_tokens > start:
        yield Run(start, batch.num_tokens, prefill)
