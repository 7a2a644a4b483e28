"""C6: 64-bit addressing of every slot × stride product, in all three verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...cache import CacheFormat, CacheView
from ..geometries import FP8, FULL, PLAIN, Geometry
from ..lane import Layer, Span
from .case import variants
from .rows import demand_as_one_shot, lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate

_LENGTH = 75


def _sparse_view(cache_format: CacheFormat, block_size: int, stride: int, num_blocks: int, where: str) -> CacheView:
    """Memory that is reserved and not touched: on a CPU, pages that nobody writes cost nothing."""
    return CacheView(
        storage=torch.empty(num_blocks * stride, dtype=torch.uint8, device=where),
        format=cache_format,
        block_size=block_size,
        block_stride_bytes=stride,
        num_blocks=num_blocks,
    )


def far_apart(candidate: Candidate, geometry: Geometry, past: int) -> None:
    """Blocks on both sides of ``past`` bytes: few with a large stride, then many small ones (large slot numbers)."""
    size, prompt, lane = (
        geometry.block_size,
        prompts_of(geometry, "normal", (_LENGTH,))[0],
        lane_for(candidate, geometry),
    )
    needed, block_bytes = -(-_LENGTH // size), size * max(geometry.latent.row_bytes, geometry.index.row_bytes)
    for stride in (past // needed // 64 * 64 + 2 * block_bytes, block_bytes):
        first = max(past // stride - needed // 2, 0)
        table = torch.arange(first + needed - 1, first - 1, -1, dtype=torch.int32, device=candidate.where)
        layer = Layer(
            geometry=geometry,
            prompts=(prompt,),
            latent=_sparse_view(geometry.latent, size, stride, first + needed, candidate.where),
            index=_sparse_view(geometry.index, size, stride, first + needed, candidate.where),
            table=table.unsqueeze(0),
        )
        for span in (Span(0, 0, 60), Span(0, 60, _LENGTH)):
            demand_as_one_shot(candidate, layer, [span], lane.step(layer, [span]))


CASES = (
    *variants("C6", far_apart, (PLAIN, 2**31), (FP8.blocks_of(1), 2**31)),
    *variants("C6", far_apart, (PLAIN, 2**32), (FP8, 2**32), (PLAIN.blocks_of(1), 2**32), tag=FULL),
)
