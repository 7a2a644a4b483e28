"""C3: empty is legal: no tokens, no requests, padding, rows without a visible key. Indices −1, output 0, lse −inf."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...batch import BatchLayout
from ...reference.write import decode_rows
from ..compare import check_attention, demand, require
from ..geometries import FP8, ODD, PLAIN, Geometry
from ..lane import JUNK, Asked, Rows, Span, demand_empty, demand_same, new_layer, one_shot, padded, whole
from .case import variants
from .rows import demand_as_one_shot, lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate
    from ..lane import Lane, Layer

_OUT_OF_RANGE = (-1, -7, -(2**31), 3, 99, 2**31 - 1)
"""Request numbers that padding rows may carry; there are three requests."""


def _setting(candidate: Candidate, geometry: Geometry) -> tuple[Lane, Layer]:
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    return lane, layer


def nothing(candidate: Candidate, geometry: Geometry) -> None:
    """No requests, no tokens; requests without tokens; only padding; nothing to write."""
    lane, layer = _setting(candidate, geometry)
    lane.write(layer, [])
    lane.write(layer, [], padding=4)
    lane.write(layer, [Span(1, 5, 5)])
    for spans in ([], [Span(0, 0, 0)], [Span(0, 60, 60), Span(2, 0, 0)]):
        for padding in (0, 1, 5):
            for rows in lane.read(layer, spans, padding):
                require(rows.out.shape[0] == 0, "rows came out of a request without tokens")
    narrow = replace(layer, table=layer.table[:, :0])
    demand_empty(lane.read(narrow, [Span(0, 0, 0)], 2)[0], "a batch without blocks")


def mixed(candidate: Candidate, geometry: Geometry) -> None:
    """Empty requests between others, and padding, change nothing for those that have tokens."""
    lane, layer = _setting(candidate, geometry)
    spans = [Span(1, 20, 20), Span(0, 100, 131), Span(1, 0, 0), Span(2, 22, 23), Span(2, 0, 0)]
    demand_as_one_shot(candidate, layer, spans, lane.read(layer, spans, padding=3))


def padding_junk(candidate: Candidate, geometry: Geometry) -> None:
    """Padding rows with request numbers out of range, NaN queries, and indices that look valid."""
    lane, layer = _setting(candidate, geometry)
    spans = [Span(0, 125, 131), Span(2, 20, 23), Span(1, 49, 50)]
    real = sum(span.size for span in spans)
    batch = layer.batch(spans, len(_OUT_OF_RANGE))
    numbers = batch.req_id_per_token.clone()
    numbers[real:] = torch.tensor(_OUT_OF_RANGE, dtype=torch.int32)
    asked = layer.asked(spans).padded(len(_OUT_OF_RANGE))
    clean = lane.ask(layer, batch, asked)
    dirty = replace(batch, req_id_per_token=numbers)
    rows = lane.ask(layer, dirty, asked)
    demand_same(rows, clean, f"{geometry} with junk in its padding")
    demand_empty(rows.at(slice(real, None)), f"{geometry} padding")
    indices = rows.indices.clone()
    for row, junk in enumerate((0, 5, JUNK), start=real):
        indices[row] = junk
    out, lse = lane.attend(layer, batch, asked, indices)
    stale = Rows(rows.indices, rows.lens, out, lse)
    demand_same(stale, clean, f"{geometry} with stale indices in its padding")


def nothing_visible(candidate: Candidate, geometry: Geometry) -> None:
    """Fewer tokens in the cache than in the query: the first rows see nothing, the others as ever."""
    lane, layer = _setting(candidate, geometry)
    extra = 4
    prompt = layer.prompts[2]
    batch = BatchLayout.build(query_lens=[extra + 10], seq_lens=[10], block_table=layer.table[2:])
    asked = layer.asked([Span(2, 0, 10)])
    late = Asked(*(torch.cat([padded(field[:0], extra), field]) for field in asked))
    rows = lane.ask(layer, batch, late)
    demand_empty(rows.at(slice(0, extra)), f"{geometry} rows before the first key")
    demand_same(rows.at(slice(extra, None)), one_shot(candidate, geometry, prompt).at(slice(0, 10)), str(geometry))
    forgotten = BatchLayout.build(query_lens=[extra + 10], seq_lens=[0], block_table=layer.table[2:])
    demand_empty(lane.ask(layer, forgotten, late), f"{geometry} a request with nothing in the cache")


def index_lists(candidate: Candidate, geometry: Geometry) -> None:
    """Attend over any list of positions: none, −1 anywhere, any order; duplicates count twice."""
    lane, layer = _setting(candidate, geometry)
    topk, span = geometry.dims.index_topk, Span(0, 95, 101)
    batch, asked = layer.batch([span]), layer.asked([span])
    lists = torch.full((span.size, topk), -1, dtype=torch.int32)
    lists[1, -1] = 7
    lists[2, ::2] = torch.arange(lists[2, ::2].numel(), dtype=torch.int32) + 3
    lists[3] = torch.arange(topk + 10, 10, -1, dtype=torch.int32)
    lists[4] = 41
    out, lse = lane.attend(layer, batch, asked, lists.to(candidate.where))
    latent, _ = decode_rows(layer.latent, layer.slots(Span(0, 0, span.stop)).tolist())
    for row, chosen in enumerate(lists.long()):
        rows, scale = latent[chosen[chosen >= 0]], geometry.dims.softmax_scale
        demand(
            check_attention(row, out[row], lse[row], asked.q[row], rows, scale, matrix_units=out.device.type != "cpu"),
            str(geometry),
        )


CASES = (
    *variants("C3", nothing, (PLAIN,), (FP8,), (ODD,)),
    *variants("C3", mixed, (PLAIN,), (FP8,)),
    *variants("C3", padding_junk, (PLAIN,), (FP8,)),
    *variants("C3", nothing_visible, (PLAIN,), (FP8,), (ODD,)),
    *variants("C3", index_lists, (PLAIN,), (FP8,), (ODD,)),
)
