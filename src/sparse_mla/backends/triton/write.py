"""write: a program a row, quantised as the format's rule says; bytes are the same on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .encoding import encoded
from .launch import launch
from .operands import empty_view, row_stride, rows_of, torch_dtype
from .scratch import power_of_two

if TYPE_CHECKING:
    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

RUNTIME = ["source_stride", "block_stride", "scale_block_stride", "num_slots"]
SLICED = ["source", "slots", "scales"]
"""Pointers that may begin anywhere; see scores.py."""


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def copy_rows(
    source,
    slots,
    target,
    source_stride,
    block_stride,
    num_slots,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Row i of ``source`` to columns [COLUMN, COLUMN + WIDTH) of slot ``slots[i]``; nowhere for a slot outside."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        column = tl.arange(0, WIDTH_PADDED)
        start = (slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * ROW_STRIDE) * UNIT
        value = tl.load(source + row * source_stride + column, mask=column < WIDTH)
        tl.store(target + start + COLUMN + column, value.to(target.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def quantise_rows(
    source,
    slots,
    target,
    scales,
    source_stride,
    block_stride,
    scale_block_stride,
    num_slots,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    FP8_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ENCODING: tl.constexpr,
):
    """Row i of ``source`` as fp8 bytes and one fp32 scale to slot ``slots[i]``. A NaN makes the scale and the row NaN."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if (slot >= 0) & (slot < num_slots):
        column = tl.arange(0, WIDTH)
        value = tl.load(source + row * source_stride + column).to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(value), 0), AMAX_FLOOR)
        scale = tl.div_rn(tl.where(tl.max((value != value).to(tl.int32), 0) > 0, float("nan"), largest), FP8_MAX)
        if POWER_OF_TWO:
            bits = scale.to(tl.uint32, bitcast=True)
            rounded = ((bits + 0x7FFFFF) & 0xFF800000).to(tl.float32, bitcast=True)
            scale = tl.where(tl.abs(scale) < float("inf"), rounded, scale)
        quotient = tl.div_rn(value, tl.zeros_like(value) + scale)
        quotient = tl.where(quotient > FP8_MAX, FP8_MAX, tl.where(quotient < -FP8_MAX, -FP8_MAX, quotient))
        block, inside = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        tl.store(target + (block * block_stride + inside * ROW_STRIDE) * UNIT + column, encoded(quotient, ENCODING))
        tl.store(scales + block * scale_block_stride + inside, scale)


class Write:
    """WriteKernel for index_fp8 and plain caches."""

    def __init__(self, problem: Problem, device: Device) -> None:
        del device
        self._problem = problem

    def warm_up(self, where: torch.device) -> None:
        """Write one row of each kind to no slot."""
        problem, dims = self._problem, self._problem.dims
        nowhere = torch.full((1,), -1, dtype=torch.int64, device=where)
        row = torch.zeros(1, dims.head_dim, dtype=torch_dtype(problem.dtype), device=where)
        latent = empty_view(problem.latent, problem.latent_block_size, where)
        self.latent(row[:, : dims.kv_lora_rank], row[:, dims.kv_lora_rank :], latent, nowhere)
        index_k = torch.zeros(1, dims.index_head_dim, dtype=row.dtype, device=where)
        self.index(index_k, empty_view(problem.index, problem.index_block_size, where), nowhere)

    def latent(self, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        self._copy("kv_c", kv_c, view, slots, 0)
        if k_pe.shape[1]:
            self._copy("k_pe", k_pe, view, slots, kv_c.shape[1])

    def index(self, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        rule = view.format.rule
        if rule is None:
            self._copy("index_k", index_k, view, slots, 0)
            return
        rows, scale = rows_of(view, "values"), view.field("scale")
        launch(
            quantise_rows,
            (slots.shape[0],),
            index_k,
            slots,
            rows.tensor.view(torch.uint8),
            scale,
            row_stride("index_k", index_k),
            rows.block_stride,
            scale.stride(0),
            view.num_slots,
            WIDTH=view.format.width,
            ROW_STRIDE=rows.row_stride,
            BLOCK_SIZE=view.block_size,
            UNIT=rows.unit,
            AMAX_FLOOR=rule.amax_floor,
            FP8_MAX=rule.fp8_max,
            POWER_OF_TWO=rule.power_of_two,
            ENCODING=view.format.encoding,
            num_warps=1,
        )

    def _copy(self, name: str, source: torch.Tensor, view: CacheView, slots: torch.Tensor, column: int) -> None:
        rows = rows_of(view, "values")
        launch(
            copy_rows,
            (slots.shape[0],),
            source,
            slots,
            rows.tensor,
            row_stride(name, source),
            rows.block_stride,
            view.num_slots,
            COLUMN=column,
            WIDTH=source.shape[1],
            WIDTH_PADDED=power_of_two(source.shape[1]),
            ROW_STRIDE=rows.row_stride,
            BLOCK_SIZE=view.block_size,
            UNIT=rows.unit,
            num_warps=1,
        )
