"""Cache rows as byte tables, and strided views of caches that an engine owns.

A cache is ``num_blocks`` blocks of ``block_size`` rows. A *row-major* format stores row after row; a *planar* one stores,
inside each block, all rows of the first field, then all rows of the second. Nothing here copies: a backend addresses
by block stride, so a cache may be a slice of a larger allocation with anything between two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import CacheFormatError
from .shapes import DTYPE_NAMES, dtype_name

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "fp8": 1, "fp8fnuz": 1}
"""Bytes of one value, by short dtype name."""
FP8_MAX = {"fp8": 448.0, "fp8fnuz": 224.0}
"""Largest magnitude that write rules use: OCP e4m3fn reaches 448; e4m3fnuz reaches 240, and engines scale to 224."""
_DS_MLA_GROUP = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """``count`` values of one dtype in each row."""

    name: str
    dtype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one row."""
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRule:
    """How an engine turns values into fp8 and a scale: scale = max(amax, amax_floor) / fp8_max, per group of values.

    ``power_of_two`` rounds the scale up to the next power of two ("ue8m0"). Values are divided by the scale, clamped to
    ±fp8_max and rounded to nearest, ties to even. A reader accepts any positive scale.
    """

    amax_floor: float
    fp8_max: float
    power_of_two: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFormat:
    """Byte table of one row; ``width`` is the number of logical values a row stands for."""

    name: str
    width: int
    fields: tuple[Field, ...]
    planar: bool = False
    rule: WriteRule | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all fields."""
        return sum(field.nbytes for field in self.fields)

    @property
    def encoding(self) -> str:
        """Dtype of the first field: what values are stored as (``fp8``, ``fp8fnuz``, ``bf16``, ...)."""
        return self.fields[0].dtype

    def place(self, name: str, block_size: int) -> tuple[Field, int, int]:
        """Field ``name``, its byte offset inside a block, and the bytes from one row to the next."""
        offset = 0
        for field in self.fields:
            if field.name == name:
                return field, offset, field.nbytes if self.planar else self.row_bytes
            offset += field.nbytes * (block_size if self.planar else 1)
        raise CacheFormatError(f"format {self.name} has no field {name!r}", needs=[f.name for f in self.fields])

    def __str__(self) -> str:
        return f"{self.name}[{self.width} {self.encoding}]"


def plain(width: int, dtype: str) -> CacheFormat:
    """Rows of ``width`` values as they are: ``dtype`` is bf16, f16 or f32."""
    if dtype not in {"bf16", "f16", "f32"}:
        raise CacheFormatError("plain cache dtype", needs="bf16, f16 or f32", got=dtype)
    return CacheFormat(name="plain", width=width, fields=(Field(name="values", dtype=dtype, count=width),))


def index_fp8(width: int, *, encoding: str = "fp8", power_of_two: bool = True) -> CacheFormat:
    """Index keys as the engines store them: ``width`` fp8 values, one fp32 scale, planar inside a block.

    Layout and rule: vLLM's ``indexer_k_quant_and_cache`` (amax floor 1e-4; the scale is a power of two for the
    ``ue8m0`` scale format that DSA checkpoints ask for).
    """
    rule = WriteRule(amax_floor=1e-4, fp8_max=_fp8_max(encoding), power_of_two=power_of_two)
    fields = (Field(name="values", dtype=encoding, count=width), Field(name="scale", dtype="f32", count=1))
    return CacheFormat(name="index_fp8", width=width, fields=fields, planar=True, rule=rule)


def fp8_ds_mla(
    kv_lora_rank: int = 512, rope_dim: int = 64, *, encoding: str = "fp8", power_of_two: bool = False
) -> CacheFormat:
    """Latent rows of 656 bytes (512 + 64): fp8 values, an fp32 scale per 128 of them, rope values in bf16.

    Layout: FlashMLA's ``fp8_ds_mla``. The default rule is vLLM's ``concat_and_cache_ds_mla``: amax / 448 and no less
    than the smallest normal fp32, hence the floor; ``power_of_two`` is what FlashMLA's own quantiser does.
    """
    if kv_lora_rank % _DS_MLA_GROUP:
        raise CacheFormatError("fp8_ds_mla", needs=f"kv_lora_rank a multiple of {_DS_MLA_GROUP}", got=kv_lora_rank)
    fp8_max = _fp8_max(encoding)
    fields = (
        Field(name="values", dtype=encoding, count=kv_lora_rank),
        Field(name="scale", dtype="f32", count=kv_lora_rank // _DS_MLA_GROUP),
        Field(name="rope", dtype="bf16", count=rope_dim),
    )
    rule = WriteRule(amax_floor=fp8_max * 2.0**-126, fp8_max=fp8_max, power_of_two=power_of_two)
    return CacheFormat(name="fp8_ds_mla", width=kv_lora_rank + rope_dim, fields=fields, rule=rule)


def _fp8_max(encoding: str) -> float:
    if encoding not in FP8_MAX:
        raise CacheFormatError("fp8 encoding", needs=" or ".join(FP8_MAX), got=encoding)
    return FP8_MAX[encoding]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheView:
    """A strided view of engine memory. ``storage`` is any tensor over it; offsets count from its storage's start."""

    storage: torch.Tensor
    format: CacheFormat
    block_size: int
    block_stride_bytes: int
    num_blocks: int
    offset_bytes: int = 0

    def __post_init__(self) -> None:
        block_bytes = self.block_size * self.format.row_bytes
        if self.block_size < 1 or self.num_blocks < 0 or self.offset_bytes < 0:
            raise CacheFormatError("cache view", needs="positive sizes", got=f"block_size {self.block_size}")
        if self.block_stride_bytes < block_bytes:
            raise CacheFormatError("block stride", needs=f">= {block_bytes} bytes", got=self.block_stride_bytes)
        end = self.offset_bytes + (self.num_blocks - 1) * self.block_stride_bytes + block_bytes
        have = self.storage.untyped_storage().nbytes()
        if self.num_blocks and end > have:
            raise CacheFormatError(f"cache view of {self.num_blocks} blocks", needs=f"{end} bytes", got=have)
        for field in self.format.fields:
            _, offset, row_stride = self.format.place(field.name, self.block_size)
            item = ITEM_BYTES[field.dtype]
            if any(amount % item for amount in (self.offset_bytes + offset, row_stride, self.block_stride_bytes)):
                raise CacheFormatError(
                    f"field {field.name} of {self.format} is not aligned", needs=f"multiples of {item} bytes"
                )

    @classmethod
    def of(cls, blocks: torch.Tensor, cache_format: CacheFormat) -> CacheView:
        """View an engine's cache ``[num_blocks, block_size, row] any`` (any stride between blocks).

        Raises:
            CacheFormatError: wrong rank, wrong row width, or rows that are not dense inside a block.
        """
        item = blocks.element_size()
        if blocks.dim() != 3 or blocks.shape[2] * item != cache_format.row_bytes:
            needs = f"[num_blocks, block_size, {cache_format.row_bytes} bytes] for {cache_format}"
            got = f"{list(blocks.shape)} {dtype_name(blocks.dtype)}"
            raise CacheFormatError("cache tensor has the wrong shape", needs=needs, got=got)
        width = blocks.shape[2]
        if blocks.stride(2) != 1 or (blocks.shape[1] > 1 and blocks.stride(1) != width):
            needs = "rows that follow each other inside a block"
            raise CacheFormatError("cache tensor strides", needs=needs, got=list(blocks.stride()))
        return cls(
            storage=blocks,
            format=cache_format,
            block_size=blocks.shape[1],
            block_stride_bytes=blocks.stride(0) * item if blocks.shape[0] > 1 else blocks.shape[1] * width * item,
            num_blocks=blocks.shape[0],
            offset_bytes=int(blocks.storage_offset()) * item,
        )

    @property
    def num_slots(self) -> int:
        """Rows of the cache."""
        return self.num_blocks * self.block_size

    def field(self, name: str) -> torch.Tensor:
        """``[num_blocks, block_size, count]`` of the field's dtype, strided over the engine's own memory."""
        field, offset, row_stride = self.format.place(name, self.block_size)
        item = ITEM_BYTES[field.dtype]
        strides = (self.block_stride_bytes // item, row_stride // item, 1)
        return self._strided(field, offset, (self.num_blocks, self.block_size, field.count), strides)

    def rows(self, name: str) -> tuple[torch.Tensor, int] | None:
        """The field as ``[N, count]`` with one stride, and how many such rows lie between two blocks (the pitch).

        Slot s is row ``s // block_size * pitch + s % block_size``. None where no single stride reaches every row
        (planar blocks whose size in bytes is no multiple of a row's).
        """
        field, offset, row_stride = self.format.place(name, self.block_size)
        item = ITEM_BYTES[field.dtype]
        if self.block_size == 1:
            row_stride = self.block_stride_bytes
        if self.block_stride_bytes % row_stride:
            return None
        pitch = self.block_stride_bytes // row_stride
        num_rows = (self.num_blocks - 1) * pitch + self.block_size if self.num_blocks else 0
        return self._strided(field, offset, (num_rows, field.count), (row_stride // item, 1)), pitch

    def _strided(self, field: Field, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        import torch

        dtype = getattr(torch, DTYPE_NAMES[field.dtype])
        typed = torch.empty(0, dtype=dtype, device=self.storage.device)
        start = (self.offset_bytes + offset) // ITEM_BYTES[field.dtype]
        return typed.set_(self.storage.untyped_storage(), start, shape, strides)
