"""Hashes of one run: SHA-256 of each stage's bytes, and a digest of each row so that a difference has a place."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cache import CacheView

_BLOCKS = 64


class Trace:
    """One stage of one run, fed in ascending order of position.

    Attributes:
        kept: the tensors of the rows that the reference will judge.
    """

    def __init__(self, keep: frozenset[int] = frozenset()) -> None:
        self._sha = hashlib.sha256()
        self._keep = keep
        self._digests: dict[int, bytes] = {}
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}

    def add(self, positions: Sequence[int], *tensors: torch.Tensor) -> None:
        """Rows ``[N, ...]`` of one or more tensors; a row's record is the bytes of each, one after the other."""
        data = torch.cat([tensor.contiguous().flatten(1).view(torch.uint8) for tensor in tensors], 1).cpu()
        self._sha.update(data.numpy().data)
        for number, position in enumerate(positions):
            self._digests[position] = hashlib.sha256(data[number].numpy().data).digest()
            if position in self._keep:
                self.kept[position] = tuple(tensor[number].cpu().clone() for tensor in tensors)

    @property
    def sha256(self) -> str:
        """64 hex digits."""
        return self._sha.hexdigest()

    def digest(self, position: int) -> bytes:
        """SHA-256 of one row's record."""
        return self._digests[position]

    def first_difference(self, other: Trace) -> int | None:
        """The lowest position whose record differs."""
        mine, theirs = self._digests, other._digests
        return min((row for row in mine.keys() | theirs.keys() if mine.get(row) != theirs.get(row)), default=None)


def trace_cache(view: CacheView, blocks: torch.Tensor, total: int) -> Trace:
    """The bytes of the first ``total`` rows of a request in logical order, so wherever its blocks lie.

    Field after field as the byte table lists them, in runs of whole blocks; the digests name a run's first position.

    Args:
        blocks: ``[B] i32|i64`` physical blocks of the request.
    """
    trace = Trace()
    fields = [view.field(field.name).view(torch.uint8) for field in view.format.fields]
    for first, group in enumerate(blocks.long().split(_BLOCKS)):
        start = first * _BLOCKS * view.block_size
        rows = [torch.index_select(field, 0, group).flatten(0, 1)[: total - start] for field in fields]
        trace.add([start], *(row.reshape(1, -1) for row in rows))
    return trace
