"""Engine tensors as the kernels read them: typed, strided, and decoded where the device cannot multiply what they hold."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton.language as tl

from ...cache import CacheView
from ...errors import ShapeError
from ...shapes import DTYPE_NAMES, dtype_name

if TYPE_CHECKING:
    from ...cache import CacheFormat

_MOST_UNITS = 2**31 - 1
TRITON_TYPES = {
    "fp8": tl.float8e4nv,
    "fp8fnuz": tl.float8e4b8,
    "bf16": tl.bfloat16,
    "f16": tl.float16,
    "f32": tl.float32,
}


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, DTYPE_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def readable(tensor: torch.Tensor, operand: str) -> tuple[torch.Tensor, str]:
    """The tensor to hand to a kernel, and the encoding that it must decode ("" for none)."""
    name = dtype_name(tensor.dtype)
    if name.startswith("fp8") and name != operand:
        return tensor.view(torch.uint8), name
    return tensor, ""


class Rows(NamedTuple):
    """A field of a cache, addressed in units of ``unit`` values: the most that divides the stride of blocks and of rows.

    A row starts at ``(block * block_stride + row * row_stride) * unit``. The unit is a compile-time value, so a kernel
    knows how far its loads are aligned; for a cache without gaps it is a whole row.
    """

    tensor: torch.Tensor
    block_stride: int
    row_stride: int
    unit: int


def rows_of(view: CacheView, field: str) -> Rows:
    """Raises ShapeError where 32 bits cannot count the units of the cache (2 TiB of bf16 latents without gaps)."""
    tensor = view.field(field)
    unit = gcd(tensor.stride(0), tensor.stride(1))
    if tensor.stride(0) // unit * tensor.shape[0] > _MOST_UNITS:
        raise ShapeError("cache view", needs=f"at most {_MOST_UNITS} units of {unit} values", got=tensor.shape[0])
    return Rows(tensor, tensor.stride(0) // unit, tensor.stride(1) // unit, unit)


def empty_view(cache_format: CacheFormat, block_size: int, where: torch.device) -> CacheView:
    """One block of a cache without gaps, for warming up."""
    nbytes = block_size * cache_format.row_bytes
    storage = torch.zeros(nbytes, dtype=torch.uint8, device=where)
    return CacheView(
        storage=storage, format=cache_format, block_size=block_size, block_stride_bytes=nbytes, num_blocks=1
    )


def row_stride(name: str, tensor: torch.Tensor, unit: int = 1) -> int:
    """How far apart the rows of a tensor are, in ``unit`` values.

    Raises:
        ShapeError: that is no whole number, or the values of a row do not follow each other.
    """
    dense = tensor.shape[0] == 0 or tensor[0].is_contiguous()
    if not dense or tensor.stride(0) % unit:
        raise ShapeError(f"{name} strides", needs=f"dense rows, a multiple of {unit} apart", got=list(tensor.stride()))
    return tensor.stride(0) // unit
