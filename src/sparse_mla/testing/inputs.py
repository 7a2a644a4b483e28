"""Seeded inputs: a row depends on (seed, position) alone, never on how a prompt is cut; and caches full of junk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..cache import CacheView
from ..shapes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cache import CacheFormat
    from ..dims import MLADims

_BLOCK = 64
_NAMES = ("kv_c", "k_pe", "index_k", "index_q", "index_weights", "q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """What a layer sees of one request, made on demand, so that 1,000,000 tokens need no memory.

    Attributes:
        kind: ``normal`` (about N(0, 1), weights of both signs), ``integer`` (small whole numbers: fp32 sums are exact
            in any order, so indices must equal the reference's, ties included) or ``tied`` (like integer, with few
            distinct keys, so that most rows tie at the k-th place).
        dtype: short name of the activations' dtype.
    """

    dims: MLADims
    length: int
    seed: int
    kind: str = "normal"
    dtype: str = "bf16"

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)``; names as in the verbs: kv_c, k_pe, index_k, index_q (plain), index_weights, q."""
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        if not blocks:
            return self._block(name, 0)[:0]
        full = torch.cat([self._block(name, block) for block in blocks])
        base = blocks[0] * _BLOCK
        return full[start - base : stop - base]

    def at(self, name: str, positions: Sequence[int]) -> torch.Tensor:
        """Rows at ascending positions."""
        blocks: dict[int, torch.Tensor] = {}
        for position in positions:
            if position // _BLOCK not in blocks:
                blocks[position // _BLOCK] = self._block(name, position // _BLOCK)
        picked = [blocks[position // _BLOCK][position % _BLOCK] for position in positions]
        return torch.stack(picked) if picked else self._block(name, 0)[:0]

    def _shape(self, name: str) -> tuple[int, ...]:
        dims = self.dims
        return {
            "kv_c": (dims.kv_lora_rank,),
            "k_pe": (dims.qk_rope_head_dim,),
            "index_k": (dims.index_head_dim,),
            "index_q": (dims.index_n_heads, dims.index_head_dim),
            "index_weights": (dims.index_n_heads,),
            "q": (dims.num_heads, dims.head_dim),
        }[name]

    def _block(self, name: str, block: int) -> torch.Tensor:
        source = torch.Generator().manual_seed((self.seed * 1_000_003 + block) * len(_NAMES) + _NAMES.index(name))
        shape = (_BLOCK, *self._shape(name))
        dtype = torch.float32 if name == "index_weights" else getattr(torch, DTYPE_NAMES[self.dtype])
        if self.kind == "normal" or name in {"kv_c", "k_pe", "q"}:
            values = torch.randn(shape, generator=source, dtype=torch.float32)
        elif self.kind == "tied" and name == "index_k":
            codes = torch.randint(0, 4, (_BLOCK, 1), generator=source)
            values = (codes == torch.arange(shape[-1]) % 4).float()
        else:
            values = torch.randint(-2, 3, shape, generator=source).float()
        return values.to(dtype)


def cache_of(
    cache_format: CacheFormat, block_size: int, num_blocks: int, *, seed: int, gap_bytes: int = 0, where: str = "cpu"
) -> CacheView:
    """A cache full of junk bytes, with ``gap_bytes`` of foreign memory between blocks, as in an engine's packed pool.

    Junk includes NaN: a backend that reads a row which nobody wrote shows it.
    """
    return interleaved([cache_format], block_size, num_blocks, seed=seed, gap_bytes=gap_bytes, where=where)[0]


def interleaved(
    formats: Sequence[CacheFormat],
    block_size: int,
    num_blocks: int,
    *,
    seed: int,
    gap_bytes: int = 0,
    where: str = "cpu",
) -> list[CacheView]:
    """Caches that share one allocation of junk: block 0 of each, ``gap_bytes`` of nobody's memory, block 1 of each ..."""
    source = torch.Generator().manual_seed(seed)
    stride = block_size * sum(cache_format.row_bytes for cache_format in formats) + gap_bytes
    junk = torch.randint(0, 256, (max(num_blocks, 1) * stride,), dtype=torch.uint8, generator=source)
    storage, offset, views = junk.to(where), 0, []
    for cache_format in formats:
        views.append(
            CacheView(
                storage=storage,
                format=cache_format,
                block_size=block_size,
                block_stride_bytes=stride,
                num_blocks=num_blocks,
                offset_bytes=offset,
            )
        )
        offset += block_size * cache_format.row_bytes
    return views


def scattered_blocks(lens: Sequence[int], block_size: int, *, seed: int, spare: int = 3) -> tuple[torch.Tensor, int]:
    """A block table ``[R, B] i32`` of shuffled blocks for requests of these lengths, and how many blocks there are.

    Entries past a request's length hold −1, the worst that an engine leaves there.
    """
    counts = [-(-length // block_size) for length in lens]
    num_blocks = sum(counts) + spare
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(lens), max(counts, default=0) or 1), -1, dtype=torch.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
    return table, num_blocks


def slots_for(table: torch.Tensor, block_size: int, start: int, stop: int) -> torch.Tensor:
    """Slot mapping ``[stop − start] i64`` of positions of the request with block-table row ``table [B]``."""
    positions = torch.arange(start, stop)
    return table.long()[positions // block_size] * block_size + positions % block_size
