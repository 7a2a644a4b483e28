"""write in torch: quantise as the format's rule says, scatter each field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...quantize import quantize
from .gather import scatter

if TYPE_CHECKING:
    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem


class Write:
    """WriteKernel for every format."""

    def __init__(self, problem: Problem, device: Device) -> None:
        del device
        self._kv_lora_rank = problem.dims.kv_lora_rank

    def warm_up(self, where: torch.device) -> None:
        """Nothing to compile."""

    def latent(self, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        kept, slots = _kept(slots)
        kv_c, k_pe = kv_c[kept], k_pe[kept]
        if view.format.name == "plain":
            scatter(view, "values", slots, torch.cat((kv_c, k_pe), -1).to(view.field("values").dtype))
            return
        rule = view.format.rule
        assert rule is not None  # every fp8 format has one
        groups = view.format.place("scale", view.block_size)[0].count
        coded, scale = quantize(kv_c.unflatten(-1, (groups, -1)), rule, view.format.encoding)
        scatter(view, "values", slots, coded.flatten(-2))
        scatter(view, "scale", slots, scale.squeeze(-1))
        scatter(view, "rope", slots, k_pe.to(torch.bfloat16))

    def index(self, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        kept, slots = _kept(slots)
        if view.format.name == "plain":
            scatter(view, "values", slots, index_k[kept].to(view.field("values").dtype))
            return
        rule = view.format.rule
        assert rule is not None
        coded, scale = quantize(index_k[kept], rule, view.format.encoding)
        scatter(view, "values", slots, coded)
        scatter(view, "scale", slots, scale)


def _kept(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that have a slot, and their slots."""
    kept = (slots >= 0).nonzero().squeeze(-1)
    return kept, slots[kept]
