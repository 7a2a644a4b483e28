"""C11: outputs within a bound stated from reduction lengths and dtypes; exact where fp32 is exact in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...reference.write import decode_rows
from ..compare import check_attention, check_selection, demand
from ..geometries import BENCH, DEEPSEEK_TP8, FNUZ, FP8, GLM_TP4, GLM_TP4_FP8, ODD, PLAIN, SMALL, Geometry
from ..lane import Lane, Span, demand_reference, new_layer, whole
from .case import variants
from .rows import lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate


def reference(candidate: Candidate, geometry: Geometry, kind: str) -> None:
    """Every row of a chunked prefill of two requests, and its selection, against float64 on the cache's own bytes."""
    prompts, lane = prompts_of(geometry, kind, (90, 37)), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    for spans in ([Span(0, 0, 50), Span(1, 0, 37)], [Span(0, 50, 90)]):
        for span, rows in zip(spans, lane.step(layer, spans), strict=True):
            positions = range(span.start, span.stop)
            demand_reference(layer, span.request, rows, positions, exact=kind != "normal", where=str(geometry))


def plain_queries(candidate: Candidate, geometry: Geometry) -> None:
    """Index queries in the activations' dtype on fp8 keys."""
    prompt, lane = prompts_of(geometry, "normal", (90,))[0], lane_for(candidate, geometry)
    layer, span = new_layer(geometry, [prompt], where=candidate.where), Span(0, 0, 90)
    lane.write(layer, [span])
    index_q, weights = layer.rows("index_q", [span]), layer.rows("index_weights", [span])
    indices, _ = lane.select(layer, layer.batch([span]), layer.asked([span])._replace(index_q=index_q, weights=weights))
    keys, scale = decode_rows(layer.index, layer.slots(span).tolist())
    for row in range(span.size):
        seen = slice(0, row + 1)
        demand(check_selection(row, indices[row], index_q[row], weights[row], keys[seen], scale[seen]), str(geometry))


def magnitudes(candidate: Candidate, geometry: Geometry, factor: float) -> None:
    """Queries so large that the softmax is one-hot and its exponents overflow, or so small that it is flat."""
    lane, prompt = lane_for(candidate, geometry), prompts_of(geometry, "normal", (70,))[0]
    layer = new_layer(geometry, [prompt], where=candidate.where)
    lane.write(layer, whole([prompt]))
    span = Span(0, 40, 70)
    batch, asked = layer.batch([span]), layer.asked([span])
    asked = asked._replace(q=(asked.q.float() * factor).to(asked.q.dtype))
    indices, _ = lane.select(layer, batch, asked)
    out, lse = lane.attend(layer, batch, asked, indices)
    latent, _ = decode_rows(layer.latent, layer.slots(Span(0, 0, 70)).tolist())
    for row, chosen in enumerate(indices.long().cpu()):
        rows, scale = latent[chosen[chosen >= 0]], geometry.dims.softmax_scale
        demand(
            check_attention(row, out[row], lse[row], asked.q[row], rows, scale, matrix_units=out.device.type != "cpu"),
            f"{geometry} times {factor}",
        )


def whole_numbers(candidate: Candidate, geometry: Geometry) -> None:
    """Equal keys make every weight 1 / n: the output is a mean of whole numbers, and lse its score plus log n."""
    topk, dims = geometry.dims.index_topk, geometry.dims
    prompt, lane = prompts_of(geometry, "normal", (topk,))[0], lane_for(candidate, geometry)
    layer = new_layer(geometry, [prompt], where=candidate.where)
    dtype = prompt.rows("kv_c", 0, 1).dtype
    values = torch.arange(topk, dtype=dtype).unsqueeze(1).expand(topk, dims.kv_lora_rank).contiguous()
    rope, slots = torch.zeros(topk, dims.qk_rope_head_dim, dtype=dtype), layer.slots(Span(0, 0, topk))
    values, rope, slots = (part.to(lane.where) for part in (values, rope, slots))
    lane.operator.write_latent(values, rope, layer.latent, slots)
    batch, asked = layer.batch([Span(0, topk - 1, topk)]), layer.asked([Span(0, topk - 1, topk)])
    asked = asked._replace(q=torch.zeros_like(asked.q))
    indices = torch.arange(topk, dtype=torch.int32, device=lane.where).unsqueeze(0)
    out, lse = lane.attend(layer, batch, asked, indices)
    latent, _ = decode_rows(layer.latent, layer.slots(Span(0, 0, topk)).tolist())
    demand(
        check_attention(
            0, out[0], lse[0], asked.q[0], latent, dims.softmax_scale, matrix_units=out.device.type != "cpu"
        ),
        str(geometry),
    )


def at_model_size(candidate: Candidate, geometry: Geometry, length: int) -> None:
    """Sampled rows of a real model's rank, at a length where every row is sparse."""
    prompt = prompts_of(geometry, "normal", (length,))[0]
    lane = Lane(candidate, geometry.problem(max_num_tokens=8192, max_num_requests=1, max_model_len=length))
    layer = new_layer(geometry, [prompt], where=candidate.where)
    for start in range(0, length, 8192):
        lane.write(layer, [Span(0, start, min(start + 8192, length))])
    for start in range(geometry.dims.index_topk, length, length // 16):
        rows = lane.read(layer, [Span(0, start, min(start + 3, length))])[0]
        demand_reference(layer, 0, rows, range(start, min(start + 3, length)), where=str(geometry))


CASES = (
    *variants("C11", reference, *((geometry, kind) for geometry in SMALL for kind in ("normal", "integer", "tied"))),
    *variants(
        "C11", magnitudes, *((geometry, factor) for geometry in (PLAIN, FP8, ODD) for factor in (1e-4, 30.0, 1e3))
    ),
    *variants("C11", plain_queries, (FP8,), (FNUZ,)),
    *variants("C11", whole_numbers, (PLAIN,), (ODD,)),
    *variants("C11", at_model_size, *((g, 20000) for g in (GLM_TP4, GLM_TP4_FP8, DEEPSEEK_TP8)), tag=BENCH),
)
