"""attend: an online softmax over the selected rows of the paged latent cache, by the index list and nothing else.

A program takes one token and a tile of its heads. The list is cut into segments that start at fixed places. Where few
tokens would leave the device idle each segment is a program of its own, and ``merge_parts`` adds them up; elsewhere one
program walks over the whole list and, between segments, adds them up in the same order with the same operations: the bits
agree.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ...batch import BatchLayout
from ...shapes import dtype_name
from ...workspace import Workspace, packed_bytes
from .launch import early, follow, launch
from .operands import TRITON_TYPES, Rows, empty_view, row_stride, rows_of, torch_dtype
from .runs import Run, runs
from .scratch import attend_buffers
from .softmax import LOG2_E, load_pieces, merged, store_pieces, store_result, take_rows, unseen
from .tuning import DECODE_THRESHOLD, attend_split, attend_tile, operand

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

RUNTIME = ["first_row", "index_stride", "query_stride", "table_stride", "table_width", "block_stride"]
SLICED = ["block_table", "requests", "indices"]
"""Pointers that may begin anywhere; see scores.py."""


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def locate(
    block_table,
    requests,
    indices,
    places,
    counts,
    first_row,
    index_stride,
    table_stride,
    table_width,
    block_stride,
    TOPK: tl.constexpr,
    PLACES: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a token: where the rows of its list are, without the −1 and whatever else is no position.

    Done once, in one layout: in the loop of ``attend_rows`` each thread would repeat it for half of the rows of a tile.
    The rest of the line repeats the first place, so that loads need no mask and no other row's NaN is read.
    """
    follow(EARLY)
    local = tl.program_id(0)
    row = (first_row + local).to(tl.int64)
    request = tl.load(requests + row)
    slot = tl.arange(0, PLACES)
    position = tl.load(indices + row * index_stride + slot, mask=slot < TOPK, other=-1)
    valid = (position >= 0) & (position < tl.where(request < 0, 0, table_width * BLOCK_SIZE))
    blocks = block_table + tl.maximum(request, 0).to(tl.int64) * table_stride
    block = tl.load(blocks + position // BLOCK_SIZE, mask=valid, other=0)
    place = block * block_stride + position % BLOCK_SIZE * ROW_STRIDE
    line = places + local.to(tl.int64) * PLACES
    count = tl.sum(valid.to(tl.int32), 0)
    first = tl.max(tl.where(valid & (slot == tl.min(tl.where(valid, slot, PLACES), 0)), place, 0), 0)
    if tl.max(tl.where(valid, slot, -1), 0) + 1 == count:  # as select leaves it: no gaps to close
        tl.store(line + slot, tl.where(valid, place, first))
    else:
        order = tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(line + order, place, mask=valid)
        tl.store(line + slot, first, mask=slot >= count)
    tl.store(counts + local, count)


@triton.jit(do_not_specialize=RUNTIME)
def attend_rows(
    query,
    latent,
    places,
    counts,
    out,
    lse,
    part,
    part_peak,
    part_mass,
    first_row,
    query_stride,
    scale,
    PLACES: tl.constexpr,
    SEGMENT: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    LSE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Axis 0: token by token, the head tiles of a token side by side so that they share its rows in the cache.

    With SPLIT axis 1 is the segment, and parts are stored; else all PARTS segments are merged here.
    """
    follow(EARLY)
    TILES: tl.constexpr = (HEADS + HEAD_TILE - 1) // HEAD_TILE
    local = (tl.program_id(0) // TILES).to(tl.int64)
    head = tl.program_id(0) % TILES * HEAD_TILE + tl.arange(0, HEAD_TILE)
    asked_at = query + (first_row + local) * query_stride * VECTOR + (head * (RANK + ROPE))[:, None]
    asked = load_pieces(asked_at, (head < HEADS)[:, None], 0.0, RANK, ROPE, WIDTH, OPERAND)
    count = tl.load(counts + local)
    peak, mass, total = unseen(HEAD_TILE, RANK, WIDTH)
    whole_peak, whole_mass, whole_total = peak, mass, total
    begin = tl.program_id(1) * SEGMENT if SPLIT else 0
    end = tl.minimum(begin + SEGMENT, count) if SPLIT else count
    # One loop over all segments: the rows of the next one are on their way while one is added up.
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        if not SPLIT and PARTS > 1 and first % SEGMENT == 0:
            whole_peak, whole_mass, whole_total = merged(whole_peak, whole_mass, whole_total, peak, mass, total)
            peak, mass, total = unseen(HEAD_TILE, RANK, WIDTH)
        slot = first + tl.arange(0, KEYS)
        start = latent + tl.load(places + local * PLACES + slot).to(tl.int64)[:, None] * UNIT
        rows = load_pieces(start, None, None, RANK, ROPE, WIDTH, OPERAND)
        peak, mass, total = take_rows(asked, rows, slot < end, peak, mass, total, scale * LOG2_E)
    if not SPLIT and PARTS > 1:
        peak, mass, total = merged(whole_peak, whole_mass, whole_total, peak, mass, total)
    if SPLIT:
        line = (local * PARTS + tl.program_id(1)) * HEADS + head
        store_pieces(part, line, head < HEADS, total)
        tl.store(part_peak + line, peak, mask=head < HEADS)
        tl.store(part_mass + line, mass, mask=head < HEADS)
    else:
        store_result(out, lse, first_row + local, head, peak, mass, total, HEADS, LSE)


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
    EARLY: tl.constexpr,
):
    """Add up the parts of a token (axis 0) and a tile of its heads (axis 1), in order.

    Empty segments at the end are added too, where ``attend_rows`` skips them: that changes no bit of a sum that began at +0.
    """
    follow(EARLY)
    local = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    real = head < HEADS
    peak, mass, total = unseen(HEAD_TILE, RANK, RANK)
    for segment in tl.static_range(PARTS):
        line = (local * PARTS + segment) * HEADS + head
        new_peak = tl.load(part_peak + line, mask=real, other=float("-inf"))
        new_mass = tl.load(part_mass + line, mask=real, other=0.0)
        at = part + (line * RANK)[:, None] + tl.arange(0, RANK)[None, :]
        new_total = tl.load(at, mask=real[:, None], other=0.0)
        peak, mass, total = merged(peak, mass, total, new_peak, new_mass, (new_total,))
    store_result(out, lse, first_row + local, head, peak, mass, total, HEADS, LSE)


class Attend:
    """AttendKernel for plain caches, kv_lora_rank 512, rope dim 0 or 64, any number of heads."""

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        self._split = attend_split(problem, device)
        self._tiles = {decode: attend_tile(problem, device, decode=decode) for decode in (False, True)}

    def warm_up(self, where: torch.device) -> None:
        """Run every kernel on tokens that attend to nothing, decoding and prefilling, with and without lse."""
        problem, dims = self._problem, self._problem.dims
        specs = attend_buffers(problem, self._device, 0)
        workspace = Workspace(where)
        workspace.reserve(packed_bytes(specs))
        view = empty_view(problem.latent, problem.latent_block_size, where)
        dtype = torch_dtype(problem.dtype)
        split, units = self._split.rows, self._device.units
        # At these numbers of rows it changes how they are split and how far ahead they are fetched.
        decoding = [(1,) * rows for rows in (1, split, split + 1, units + 1)]
        for query_lens in (*decoding, (DECODE_THRESHOLD + 1,)):
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
            for lse in (None, torch.empty(rows, dims.num_heads, dtype=torch.float32, device=where)):
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
        latent, rows = rows_of(view, "values"), scratch["places"].shape[0]
        for run in runs(batch, one_order=self._split.strict):
            for start in range(run.start, run.stop, rows):
                part = Run(start, min(start + rows, run.stop), run.prefill)
                self._locate(part, latent, view.block_size, indices, batch, scratch)
                self._attend(part, latent, q, softmax_scale, out, lse, scratch)

    def _locate(
        self,
        run: Run,
        latent: Rows,
        block_size: int,
        indices: torch.Tensor,
        batch: BatchLayout,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        table = batch.block_table
        launch(
            locate,
            (run.stop - run.start,),
            table,
            batch.req_id_per_token,
            indices,
            scratch["places"],
            scratch["counts"],
            run.start,
            row_stride("indices", indices),
            row_stride("block_table", table),
            table.shape[1],
            latent.block_stride,
            TOPK=self._problem.dims.index_topk,
            PLACES=scratch["places"].shape[1],
            ROW_STRIDE=latent.row_stride,
            BLOCK_SIZE=block_size,
            **early(self._device),
            num_warps=4,
        )

    def _attend(
        self,
        run: Run,
        latent: Rows,
        q: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        dims, tile, rows = self._problem.dims, self._tiles[not run.prefill], run.stop - run.start
        vector = gcd(dims.head_dim, 8)
        row_stride("out", out, dims.num_heads * dims.kv_lora_rank)
        results = (out, out if lse is None else lse)
        parts = tuple(scratch.get(name, scratch["places"]) for name in ("part", "peak", "mass"))
        shape = {"LSE": lse is not None, "HEADS": dims.num_heads, "RANK": dims.kv_lora_rank}
        split = not run.prefill and self._split.parts > 1 and rows <= self._split.rows
        whole = {"SEGMENT": scratch["places"].shape[1], "PARTS": 1}
        grid = (rows * -(-dims.num_heads // tile.heads), self._split.parts if split else 1)
        lone = grid[0] * grid[1] <= self._device.units
        launch(
            attend_rows,
            grid,
            q,
            latent.tensor,
            scratch["places"],
            scratch["counts"],
            *results,
            *parts,
            run.start,
            row_stride("q", q, vector),
            float(softmax_scale),
            **shape,
            **(whole if run.prefill else {"SEGMENT": self._split.segment, "PARTS": self._split.parts}),
            PLACES=scratch["places"].shape[1],
            ROPE=dims.qk_rope_head_dim,
            UNIT=latent.unit,
            VECTOR=vector,
            OPERAND=TRITON_TYPES[operand(dtype_name(latent.tensor.dtype), dtype_name(q.dtype), self._device)],
            SPLIT=split,
            HEAD_TILE=tile.heads,
            KEYS=tile.keys,
            WIDTH=tile.width,
            STAGES=tile.lone_stages if lone else tile.stages,
            **early(self._device),
            num_warps=tile.warps,
        )
        if split:
            self._merge(run, results, parts, shape)

    def _merge(
        self, run: Run, results: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], shape: dict[str, int]
    ) -> None:
        rows, group = run.stop - run.start, 4
        launch(
            merge_parts,
            (rows, -(-self._problem.dims.num_heads // group)),
            *results,
            *parts,
            run.start,
            **shape,
            PARTS=self._split.parts,
            HEAD_TILE=group,
            **early(self._device),
            num_warps=4,
        )
