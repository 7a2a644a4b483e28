"""C7: memory is promised before it is used, and what stands in scratch, stale rows or padding never reaches a result."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...errors import WorkspaceError
from ...shapes import DTYPE_NAMES
from ...workspace import BufferSpec, Workspace, packed_bytes
from ..compare import refusal, require
from ..geometries import BENCH, FNUZ, FP8, GLM_TP4, GLM_TP4_FP8, PLAIN, Geometry, fp8_caches, plain_caches, sizes
from ..lane import POISON, Lane, Span, demand_empty, new_layer, whole
from ..meter import peak_bytes
from ..scores import all_equal, recent
from .case import variants
from .rows import LENGTHS, demand_as_one_shot, lane_for, prompts_of
from .selection import scored

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...plan import StagePlan
    from ..candidates import Candidate
    from ..lane import Layer

CALL_BYTES = 2 << 20
"""Temporaries that a verb may take beyond its scratch: a tile's worth, whatever the number of rows."""
TOKEN_BYTES = 32
"""And for each token of context: the candidates of one row when all of them tie."""
_WIDE = (
    fp8_caches("wide-fp8", sizes(8, 8, 200, index_dim=128)),
    plain_caches("wide", sizes(8, 32, 200, index_dim=128)),
)


def envelope(candidate: Candidate, geometry: Geometry, rows: int, context: int) -> None:
    """One plan, calls all over its (rows × context) envelope: none takes more than was promised."""
    topk = geometry.dims.index_topk
    problem = geometry.problem(max_num_tokens=rows, max_num_requests=2, max_model_len=context)
    corners = (
        (all_equal, ((1, 1), (1, topk + 1), (65, 4097), (rows, context))),
        (recent, ((1, context), (rows, 4097))),
    )
    for score_set, calls in corners:
        _, layer = scored(candidate, geometry, score_set(context, torch.Generator().manual_seed(1)))
        lane = Lane(candidate, problem)
        for count, seen in calls:
            _demand_promised(lane, layer, Span(0, seen - count, seen))
    for count in (1, 65, context):
        _demand_written(lane, layer, Span(0, 0, count))


def _demand_promised(lane: Lane, layer: Layer, span: Span) -> None:
    dims, count, where = layer.geometry.dims, span.size, lane.where
    batch, asked = layer.batch([span]), layer.asked([span])
    index_q, weights, q = (field.to(where) for field in asked)
    indices = torch.empty(count, dims.index_topk, dtype=torch.int32, device=where)
    lens = torch.empty(count, dtype=torch.int32, device=where)
    out = torch.empty(
        count, dims.num_heads, dims.kv_lora_rank, dtype=getattr(torch, DTYPE_NAMES[layer.geometry.dtype]), device=where
    )
    verbs = lane.operator
    select = partial(verbs.select, index_q, weights, layer.index, batch, out=indices, lens=lens)
    attend = partial(verbs.attend, q, layer.latent, indices, batch, dims.softmax_scale, out=out)
    for name, call in (("select", select), ("attend", attend)):
        _demand_peak(call, f"{name} of {count} rows over {span.stop} tokens", span.stop, where)


def _demand_written(lane: Lane, layer: Layer, span: Span) -> None:
    kv_c, k_pe, index_k = (layer.rows(name, [span]).to(lane.where) for name in ("kv_c", "k_pe", "index_k"))
    slots = layer.slots(span).to(lane.where)
    latent = partial(lane.operator.write_latent, kv_c, k_pe, layer.latent, slots)
    for call in (latent, partial(lane.operator.write_index, index_k, layer.index, slots)):
        _demand_peak(call, f"write of {span.size} rows", span.size, lane.where)


def _demand_peak(call: Callable[[], object], what: str, tokens: int, where: str) -> None:
    allowed, took = CALL_BYTES + TOKEN_BYTES * tokens, peak_bytes(call, where)
    require(took <= allowed, f"{what} took {took} bytes beyond its scratch, allowed are {allowed}")


def own_buffers_only(candidate: Candidate, geometry: Geometry) -> None:
    """A stage writes its own buffers and not one byte of the arena behind them."""
    lane, prompts = lane_for(candidate, geometry), prompts_of(geometry, "normal")
    space = Workspace(candidate.where)
    space.reserve(lane.operator.plan.scratch_bytes + (1 << 16))
    lane.operator, lane.workspace = candidate.operator(lane.operator.plan.problem, space), space
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    _demand_untouched(space, lane.operator.plan.write)
    batch, asked = layer.batch(whole(prompts)), layer.asked(whole(prompts))
    indices, _ = lane.select(layer, batch, asked)
    _demand_untouched(space, lane.operator.plan.select)
    lane.attend(layer, batch, asked, indices)
    _demand_untouched(space, lane.operator.plan.attend)


def _demand_untouched(space: Workspace, stage: StagePlan) -> None:
    arena = space.views([BufferSpec(name="arena", shape=(space.nbytes,), dtype="u8")])["arena"]
    behind = arena[packed_bytes(stage.buffers) :]
    require((behind == POISON).all(), f"{stage.row.stage} wrote scratch that it had not declared")


def poisoned(candidate: Candidate, geometry: Geometry) -> None:
    """Whatever byte fills the scratch before each verb."""
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    for poison in (0x00, 0x3F, 0x7F, 0x80, 0xFF):
        lane.poison = poison
        for spans in (whole(prompts), [Span(0, 130, 131), Span(1, 40, 50)]):
            demand_as_one_shot(candidate, layer, spans, lane.step(layer, spans))


def stale_rows(candidate: Candidate, geometry: Geometry) -> None:
    """Blocks that nobody owns and rows past a request's length, full of NaN, of huge and of plausible values."""
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    for byte in (0x00, 0x38, 0x7E, 0x7F, 0xFF):
        layer = new_layer(geometry, prompts, seed=byte, where=candidate.where)
        for view in (layer.latent, layer.index):
            view.storage.fill_(byte)
        for spans in ([Span(0, 0, 70), Span(1, 0, 17)], [Span(1, 17, 18), Span(0, 70, 71), Span(2, 0, 1)]):
            demand_as_one_shot(candidate, layer, spans, lane.step(layer, spans))


def host_bounds(candidate: Candidate, geometry: Geometry) -> None:
    """The host's lengths are upper bounds; block-table entries past the true length may hold anything."""
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    spans = [Span(0, 40, 60), Span(2, 0, 7), Span(1, 30, 31)]
    width = layer.table.shape[1] * geometry.block_size
    batch, asked = layer.batch(spans), layer.asked(spans)
    for junk in (-1, 2**31 - 1, 0):
        table = batch.block_table.clone()
        for row, span in enumerate(spans):
            table[row, -(-span.stop // geometry.block_size) :] = junk
        loose = replace(batch, block_table=table, seq_lens=(61, width, width - 3))
        rows, start = lane.ask(layer, loose, asked), 0
        for span in spans:
            demand_as_one_shot(candidate, layer, [span], [rows.at(slice(start, start + span.size))])
            start += span.size


def unseen(candidate: Candidate, geometry: Geometry) -> None:
    """Device lengths decide: a token whose visible length is 0 gets nothing, whatever the host says."""
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    spans = [Span(0, 90, 96), Span(1, 44, 50)]
    batch = layer.batch(spans)
    visible = batch.visible_lens.clone()
    visible[[1, 5, 6]] = 0
    rows = lane.ask(layer, replace(batch, visible_lens=visible), layer.asked(spans))
    demand_empty(rows.at([1, 5, 6]), f"{geometry} tokens that see nothing")
    demand_as_one_shot(
        candidate, layer, [Span(0, 92, 95), Span(1, 45, 50)], [rows.at([2, 3, 4]), rows.at(slice(7, 12))]
    )


def two_workspaces(candidate: Candidate, geometry: Geometry) -> None:
    """Two lanes share no byte of scratch; two operators of one lane share all of it; the answers stay."""
    prompts = prompts_of(geometry, "normal")
    one, two = (lane_for(candidate, geometry) for _ in range(2))
    (_, first_end), (second, _) = sorted(_extent(lane.workspace) for lane in (one, two))
    require(first_end <= second, "two workspaces alias")
    shared = lane_for(candidate, geometry)
    shared.workspace = one.workspace
    shared.operator = candidate.operator(one.operator.plan.problem, one.workspace)
    layer = new_layer(geometry, prompts, where=candidate.where)
    one.write(layer, whole(prompts))
    for lane, request in ((one, 0), (two, 1), (shared, 2), (one, 1), (two, 0), (shared, 1)):
        span = Span(request, LENGTHS[request] // 2, LENGTHS[request])
        demand_as_one_shot(candidate, layer, [span], lane.read(layer, [span]))


def _extent(space: Workspace) -> tuple[int, int]:
    """Where an arena lies in memory."""
    arena = space.views([BufferSpec(name="arena", shape=(space.nbytes,), dtype="u8")])["arena"]
    return arena.data_ptr(), arena.data_ptr() + space.nbytes


def locked(candidate: Candidate, geometry: Geometry) -> None:
    """An operator that needs more than a locked workspace has is refused when it is made, never in a call."""
    problem = geometry.problem(max_num_tokens=64, max_num_requests=4, max_model_len=4096)
    needed = candidate.plan(problem).scratch_bytes
    space = Workspace(candidate.where)
    space.reserve(max(needed - 1, 0))
    space.lock()
    if needed:
        said = refusal(lambda: candidate.operator(problem, space), WorkspaceError, "a workspace one byte too small")
        require(str(needed) in said, f"the refusal does not say that {needed} bytes are needed: {said}")


CASES = (
    *variants("C7", own_buffers_only, (PLAIN,), (FP8,)),
    *variants("C7", poisoned, (PLAIN,), (FP8,)),
    *variants("C7", stale_rows, (PLAIN,), (FP8,), (FNUZ,)),
    *variants("C7", host_bounds, (PLAIN,), (FP8,)),
    *variants("C7", unseen, (PLAIN,), (FP8,)),
    *variants("C7", two_workspaces, (PLAIN,)),
    *variants("C7", locked, (PLAIN,), (FP8,)),
    *variants("C7", envelope, *((geometry, 130, 6000) for geometry in _WIDE)),
    *variants("C7", envelope, (GLM_TP4, 512, 20000), (GLM_TP4_FP8, 512, 20000), tag=BENCH),
)
