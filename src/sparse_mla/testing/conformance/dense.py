"""C9: sparse is dense up to index_topk and an approximation beyond it; nothing here may hide which of the two ran."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...reference.write import decode_rows
from ..compare import check_attention, demand, require
from ..geometries import FP8, PLAIN, Geometry
from ..lane import Span, new_layer, whole
from .case import variants
from .rows import lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate


def up_to_topk(candidate: Candidate, geometry: Geometry) -> None:
    """A token with at most index_topk keys selects them all, and its output is dense attention's."""
    topk = geometry.dims.index_topk
    prompt, lane = prompts_of(geometry, "tied", (topk + 9,))[0], lane_for(candidate, geometry)
    layer = new_layer(geometry, [prompt], where=candidate.where)
    rows = lane.step(layer, whole([prompt]))[0]
    latent, _ = decode_rows(layer.latent, layer.slots(Span(0, 0, prompt.length)).tolist())
    asked = layer.asked(whole([prompt]))
    for position in range(topk):
        everything = torch.arange(position + 1, dtype=torch.int32)
        require(rows.indices[position, : position + 1].cpu().equal(everything), f"row {position} left a key out")
        q, out, lse = asked.q[position], rows.out[position], rows.lse[position]
        units, scale = out.device.type != "cpu", geometry.dims.softmax_scale
        fault = check_attention(position, out, lse, q, latent[: position + 1], scale, matrix_units=units)
        demand(fault, str(geometry))
    for position in range(topk, prompt.length):
        require(int(rows.lens[position]) == topk, f"row {position} of {geometry} does not hold index_topk keys")


def effective_topk(candidate: Candidate, geometry: Geometry) -> None:
    """The index_topk that a plan states is the one that runs."""
    for topk in (1, 5, 130):
        here = replace(geometry, dims=replace(geometry.dims, index_topk=topk))
        prompt, lane = prompts_of(here, "normal", (131,))[0], lane_for(candidate, here)
        layer = new_layer(here, [prompt], where=candidate.where)
        rows = lane.step(layer, whole([prompt]))[0]
        stated = lane.operator.plan.describe()["index_topk"]
        require(
            int(rows.lens.max()) == stated == topk, f"index_topk {topk}: {int(rows.lens.max())} ran, {stated} stated"
        )


CASES = (
    *variants("C9", up_to_topk, (PLAIN,), (FP8,)),
    *variants("C9", effective_topk, (PLAIN,)),
)
