"""Reading and writing rows of a strided cache by slot, as fp32. Shared by eager's three stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...quantize import decode_fp8
from ...shapes import DTYPE_NAMES

if TYPE_CHECKING:
    from ...cache import CacheView, Field


def slots_of(positions: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """Physical slots ``[N] i64`` of positions ``[N] i64`` in a request with block-table row ``blocks [B] i32``."""
    return blocks[positions // block_size].long() * block_size + positions % block_size


def scatter(view: CacheView, name: str, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values [N, count]`` to slots ``[N] i64``, all of them valid."""
    view.field(name)[slots // view.block_size, slots % view.block_size] = values


def gather(view: CacheView, name: str, slots: torch.Tensor, out: torch.Tensor, stored: torch.Tensor) -> None:
    """Read a field of the rows in ``slots [N] i64`` into ``out [N, count] f32``.

    Args:
        stored: at least N * field bytes ``u8`` of scratch. ``index_select`` with ``out=`` copies whole rows with both
            cores; plain indexing copies element by element, 4 to 30 times slower on a CPU.
    """
    if not out.numel():  # no rows, or a model without rope
        return
    field, _, _ = view.format.place(name, view.block_size)
    rows = stored.reshape(-1)[: slots.numel() * field.nbytes].view(_gather_dtype(field)).view(-1, field.count)
    strided = view.rows(name)
    if strided is None:
        blocks = view.field(name).view(rows.dtype)
        rows.copy_(blocks[slots // view.block_size, slots % view.block_size])
    else:
        source, pitch = strided
        wanted = slots if pitch == view.block_size else slots // view.block_size * pitch + slots % view.block_size
        torch.index_select(source.view(rows.dtype), 0, wanted, out=rows)
    if field.dtype.startswith("fp8"):
        decode_fp8(rows, field, out)
    else:
        out.copy_(rows)


def _gather_dtype(field: Field) -> torch.dtype:
    """fp8 rows move as bytes: torch has few operations on fp8 tensors."""
    return torch.uint8 if field.dtype.startswith("fp8") else getattr(torch, DTYPE_NAMES[field.dtype])
