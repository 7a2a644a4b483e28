"""attend: an online softmax over the selected rows of the paged latent cache, by the index list and nothing else.

A program takes one token and a tile of its heads. The list is cut into segments that start at fixed places. Where few
tokens would leave the device idle each segment is a program of its own, and ``merge_parts`` adds them up; elsewhere one
program walks over the segments and adds them up in the same order with the same operations: the bits agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ...batch import BatchLayout
from ...shapes import dtype_name
from ...workspace import Workspace, packed_bytes
from .launch import launch
from .operands import TRITON_TYPES, empty_view, row_stride, rows_of, torch_dtype
from .runs import Run, runs
from .scratch import attend_buffers, power_of_two
from .tuning import DECODE_THRESHOLD, attend_split, attend_tile, operand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
RUNTIME = ["first_row", "index_stride", "query_stride", "table_stride", "table_width", "block_stride"]


@triton.jit
def finite(peak):
    """What to subtract from scores: −inf − (−inf) would be NaN, so where nothing was seen it is 0 and exp2(−inf) = 0."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def merged(peak, mass, total, part_peak, part_mass, part_total):
    """Add one part to a running softmax; the order of operations is the contract, hence the explicit fma."""
    top = tl.maximum(peak, part_peak)
    old, new = tl.exp2(peak - finite(top)), tl.exp2(part_peak - finite(top))
    mass = tl.fma(part_mass, new, mass * old)
    return top, mass, tl.fma(part_total, new[:, None] + tl.zeros_like(total), total * old[:, None])


@triton.jit
def store_result(out, lse, row, head, peak, mass, total, HEADS: tl.constexpr, RANK: tl.constexpr, LSE: tl.constexpr):
    """``out [H, RANK]`` and the natural log of the sum; 0 and −inf where nothing was seen."""
    real = head < HEADS
    line = row * HEADS + head
    value = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    target = out + (line * RANK)[:, None] + tl.arange(0, RANK)[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=real[:, None])
    if LSE:
        tl.store(lse + line, tl.where(mass == 0.0, float("-inf"), (peak + tl.log2(mass)) * LN_2), mask=real)


@triton.jit
def attend_list(
    asked,
    asked_rope,
    latent,
    blocks,
    indices,
    begin,
    end,
    reach,
    scale,
    block_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maximum ``[HEADS]`` (base 2), mass ``[HEADS]`` and unnormalised output ``[HEADS, RANK]`` over a part of the list."""
    peak = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, RANK), tl.float32)
    dim = tl.arange(0, RANK)
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        slot = first + tl.arange(0, KEYS)
        position = tl.load(indices + slot, mask=slot < end, other=-1)
        valid = (position >= 0) & (position < reach)
        position = tl.where(valid, position, 0)
        block = tl.load(blocks + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        start = block * block_stride * UNIT + (position % BLOCK_SIZE) * ROW_STRIDE
        values = tl.load(latent + start[:, None] + dim[None, :], mask=valid[:, None], other=0.0).to(OPERAND)
        score = tl.dot(asked, tl.trans(values), input_precision="ieee")
        if ROPE:
            rope_at = latent + start[:, None] + (RANK + tl.arange(0, ROPE))[None, :]
            rope = tl.load(rope_at, mask=valid[:, None], other=0.0).to(OPERAND)
            score = tl.dot(asked_rope, tl.trans(rope), score, input_precision="ieee")
        score = tl.where(valid[None, :], score * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        old = tl.exp2(peak - finite(top))
        weight = tl.exp2(score - finite(top)[:, None])
        mass = mass * old + tl.sum(weight, 1)
        total = tl.dot(weight.to(OPERAND), values, total * old[:, None], input_precision="ieee")
        peak = top
    return peak, mass, total


@triton.jit
def used(indices, reach, TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr):
    """One more than the place of the last index that counts: tails of −1 cost nothing."""
    slot = tl.arange(0, TOPK_PADDED)
    position = tl.load(indices + slot, mask=slot < TOPK, other=-1)
    return tl.max(tl.where((position >= 0) & (position < reach), slot + 1, 0), 0)


@triton.jit(do_not_specialize=RUNTIME)
def attend_rows(
    query,
    latent,
    block_table,
    requests,
    indices,
    out,
    lse,
    part,
    part_peak,
    part_mass,
    first_row,
    index_stride,
    query_stride,
    table_stride,
    table_width,
    block_stride,
    scale,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    SEGMENT: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Axis 0: token by token, the head tiles of a token side by side so that they share its rows in the cache.

    With SPLIT axis 1 is the segment, and parts are stored; else all PARTS segments are merged here.
    """
    TILES: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    local = tl.program_id(0) // TILES
    row = (first_row + local).to(tl.int64)
    head = tl.program_id(0) % TILES * HEAD_TILE + tl.arange(0, HEAD_TILE)
    request = tl.load(requests + row)
    reach = tl.where(request < 0, 0, table_width * BLOCK_SIZE)
    blocks = block_table + tl.maximum(request, 0).to(tl.int64) * table_stride
    listed = indices + row * index_stride
    count = used(listed, reach, TOPK, TOPK_PADDED)
    asked_at = query + row * query_stride * UNIT + (head * (RANK + ROPE))[:, None]
    real = (head < HEADS)[:, None]
    asked = tl.load(asked_at + tl.arange(0, RANK)[None, :], mask=real, other=0.0).to(OPERAND)
    asked_rope = asked
    if ROPE:
        asked_rope = tl.load(asked_at + (RANK + tl.arange(0, ROPE))[None, :], mask=real, other=0.0).to(OPERAND)
    peak = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((HEAD_TILE,), tl.float32)
    total = tl.zeros((HEAD_TILE, RANK), tl.float32)
    for segment in range(tl.program_id(1), tl.program_id(1) + 1 if SPLIT else PARTS):
        begin = segment * SEGMENT
        new_peak, new_mass, new_total = attend_list(
            asked,
            asked_rope,
            latent,
            blocks,
            listed,
            begin,
            tl.minimum(begin + SEGMENT, count),
            reach,
            scale * LOG2_E,
            block_stride,
            RANK,
            ROPE,
            HEAD_TILE,
            KEYS,
            ROW_STRIDE,
            BLOCK_SIZE,
            UNIT,
            OPERAND,
            STAGES,
        )
        if SPLIT or PARTS == 1:
            peak, mass, total = new_peak, new_mass, new_total
        else:
            peak, mass, total = merged(peak, mass, total, new_peak, new_mass, new_total)
    if SPLIT:
        line = (local.to(tl.int64) * PARTS + tl.program_id(1)) * HEADS + head
        tl.store(part + (line * RANK)[:, None] + tl.arange(0, RANK)[None, :], total, mask=real)
        tl.store(part_peak + line, peak, mask=head < HEADS)
        tl.store(part_mass + line, mass, mask=head < HEADS)
    else:
        store_result(out, lse, row, head, peak, mass, total, HEADS, RANK, LSE)


@triton.jit(do_not_specialize=RUNTIME)
def merge_parts(
    out,
    lse,
    part,
    part_peak,
    part_mass,
    first_row,
    PARTS: tl.constexpr,
    LSE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Add up the parts of a token (axis 0) and a tile of its heads (axis 1), in order."""
    local = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    real = head < HEADS
    peak = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    mass = tl.zeros((HEAD_TILE,), tl.float32)
    total = tl.zeros((HEAD_TILE, RANK), tl.float32)
    for segment in tl.static_range(PARTS):
        line = (local * PARTS + segment) * HEADS + head
        new_peak = tl.load(part_peak + line, mask=real, other=float("-inf"))
        new_mass = tl.load(part_mass + line, mask=real, other=0.0)
        at = part + (line * RANK)[:, None] + tl.arange(0, RANK)[None, :]
        new_total = tl.load(at, mask=real[:, None], other=0.0)
        peak, mass, total = merged(peak, mass, total, new_peak, new_mass, new_total)
    store_result(out, lse, first_row + local, head, peak, mass, total, HEADS, RANK, LSE)


class Attend:
    """AttendKernel for plain caches, kv_lora_rank 512, rope dim 0 or 64, any number of heads."""

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        self._tile, self._split = attend_tile(problem, device), attend_split(problem, device)

    def warm_up(self, where: torch.device) -> None:
        """Run every kernel on tokens that attend to nothing: decoding, few and many, and prefilling, with and without lse."""
        problem, dims = self._problem, self._problem.dims
        specs = attend_buffers(problem, self._device, 0)
        workspace = Workspace(where)
        workspace.reserve(packed_bytes(specs))
        view = empty_view(problem.latent, problem.latent_block_size, where)
        dtype = torch_dtype(problem.dtype)
        many = self._split.rows + 1
        for query_lens in ((1,), (1,) * many, (DECODE_THRESHOLD + 1,)):
            rows = sum(query_lens)
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=where)
            batch = BatchLayout(
                req_id_per_token=nobody,
                visible_lens=nobody,
                block_table=torch.zeros(len(query_lens), 1, dtype=torch.int32, device=where),
                query_lens=query_lens,
                seq_lens=query_lens,
            )
            query = torch.zeros(rows, dims.num_heads, dims.head_dim, dtype=dtype, device=where)
            out = torch.empty(rows, dims.num_heads, dims.kv_lora_rank, dtype=dtype, device=where)
            indices = torch.full((rows, dims.index_topk), -1, dtype=torch.int32, device=where)
            for lse in (None, torch.empty(rows, dims.num_heads, device=where)):
                self(query, view, indices, batch, 1.0, out, lse, workspace.views(specs))

    def __call__(
        self,
        q: torch.Tensor,
        view: CacheView,
        indices: torch.Tensor,
        batch: BatchLayout,
        softmax_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        dims, latent = self._problem.dims, rows_of(view, "values")
        multiplied = operand(view.format.encoding, dtype_name(q.dtype), self._device)
        tensors = (q, latent.tensor, batch.block_table, batch.req_id_per_token, indices)
        strides = (
            row_stride("indices", indices),
            row_stride("q", q, latent.unit),
            row_stride("block_table", batch.block_table),
            batch.block_table.shape[1],
            latent.block_stride,
        )
        row_stride("out", out, dims.num_heads * dims.kv_lora_rank)
        facts = {
            "TOPK": dims.index_topk,
            "TOPK_PADDED": power_of_two(dims.index_topk),
            "ROPE": dims.qk_rope_head_dim,
            "ROW_STRIDE": latent.row_stride,
            "BLOCK_SIZE": view.block_size,
            "UNIT": latent.unit,
            "OPERAND": TRITON_TYPES[multiplied],
        }
        for run in runs(batch, strict=self._split.strict):
            self._run(run, (*tensors, out, out if lse is None else lse), (*strides, softmax_scale), facts, lse, scratch)

    def _run(
        self,
        run: Run,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        facts: dict[str, Any],
        lse: torch.Tensor | None,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        dims, tile, rows = self._problem.dims, self._tile, run.stop - run.start
        shape = {"LSE": lse is not None, "HEADS": dims.num_heads, "RANK": dims.kv_lora_rank}
        split = not run.prefill and self._split.parts > 1 and rows <= self._split.rows
        parts = tuple(scratch.get(name, tensors[0]) for name in ("part", "peak", "mass"))
        segments = {"SEGMENT": self._split.segment, "PARTS": self._split.parts}
        if run.prefill:
            segments = {"SEGMENT": facts["TOPK_PADDED"], "PARTS": 1}
        launch(
            attend_rows,
            (rows * -(-dims.num_heads // tile.heads), self._split.parts if split else 1),
            *tensors,
            *parts,
            run.start,
            *numbers,
            **facts,
            **shape,
            **segments,
            SPLIT=split,
            HEAD_TILE=tile.heads,
            KEYS=tile.keys,
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
        if split:
            group = 4
            launch(
                merge_parts,
                (rows, -(-dims.num_heads // group)),
                *tensors[-2:],
                *parts,
                run.start,
                **shape,
                PARTS=self._split.parts,
                HEAD_TILE=group,
                num_warps=4,
            )
