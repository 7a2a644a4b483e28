"""write in torch: quantise as the format's rule says, scatter each field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...quantize import quantize
from .gather import scatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

_ROWS = 256


class Write:
    """WriteKernel for every format."""

    def __init__(self, problem: Problem, device: Device) -> None:
        """Every format says itself how it is written."""

    def warm_up(self, where: torch.device) -> None:
        """Nothing to compile."""

    def latent(self, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        for kept, here in _tiles(slots):
            values, rope = kv_c[kept], k_pe[kept]
            if view.format.rule is None:
                scatter(view, "values", here, torch.cat((values, rope), -1).to(view.field("values").dtype))
                continue
            groups = view.format.place("scale", view.block_size)[0].count
            coded, scale = quantize(values.unflatten(-1, (groups, -1)), view.format.rule, view.format.encoding)
            scatter(view, "values", here, coded.flatten(-2))
            scatter(view, "scale", here, scale.squeeze(-1))
            scatter(view, "rope", here, rope.to(torch.bfloat16))

    def index(self, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        for kept, here in _tiles(slots):
            if view.format.rule is None:
                scatter(view, "values", here, index_k[kept].to(view.field("values").dtype))
                continue
            coded, scale = quantize(index_k[kept], view.format.rule, view.format.encoding)
            scatter(view, "values", here, coded)
            scatter(view, "scale", here, scale)


def _tiles(slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows that have a slot, and their slots, a few at a time: what quantising takes must not grow with the call."""
    for rows in (slots >= 0).nonzero().squeeze(-1).split(_ROWS):
        yield rows, slots[rows]
