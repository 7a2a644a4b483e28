"""write, by the byte: encodes one row at a time from the byte table, and decodes by a table of 256 values."""

from __future__ import annotations

import struct
from functools import lru_cache
from math import frexp, isfinite, ldexp, nan
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from ..cache import CacheFormat, CacheView, Field

Slots = TypeVar("Slots", int, torch.Tensor)
_CODES = {"bf16": (torch.bfloat16, 2), "f16": (torch.float16, 2), "f32": (torch.float32, 4)}


@lru_cache(maxsize=2)
def fp8_values(encoding: str) -> tuple[float, ...]:
    """The value of each of the 256 bytes. 1 sign, 4 exponent, 3 mantissa bits; OCP bias 7, fnuz bias 8."""
    bias = 8 if encoding == "fp8fnuz" else 7
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = ldexp(mantissa, -2 - bias) if exponent == 0 else ldexp(8 + mantissa, exponent - bias - 3)
        value = -size if byte >= 128 else size
        if (encoding == "fp8fnuz" and byte == 0x80) or (encoding == "fp8" and byte & 0x7F == 0x7F):
            value = nan
        values.append(value)
    return tuple(values)


def _encode_fp8(values: torch.Tensor, encoding: str) -> torch.Tensor:
    """Nearest representable value, ties to the even mantissa, by search in the table."""
    table = torch.tensor(fp8_values(encoding), dtype=torch.float64)
    positive = table[:128][~table[:128].isnan()]
    size = values.double().abs()
    high = torch.searchsorted(positive, size).clamp(max=positive.numel() - 1)
    low = (high - 1).clamp(min=0)
    up, down = positive[high] - size, size - positive[low]
    code = torch.where((up < down) | ((up == down) & (high % 2 == 0)), high, low)
    code = torch.where(size == positive[high], high, code)
    sign = torch.where(torch.signbit(values), 128, 0)
    if encoding == "fp8fnuz":
        sign = torch.where(code == 0, 0, sign)  # no negative zero: that byte is the NaN
    code = torch.where(values.isnan(), 0x80 if encoding == "fp8fnuz" else 0x7F, code + sign)
    if encoding == "fp8":
        code = torch.where(values.isnan() & torch.signbit(values), 0xFF, code)
    return code.to(torch.uint8)


def encode_row(row: torch.Tensor, cache_format: CacheFormat) -> dict[str, bytes]:
    """Bytes of each field for one logical row ``[width]``, fp32 arithmetic as the engines do it."""
    if cache_format.rule is None:
        return {"values": _raw(row, cache_format.encoding)}
    rule = cache_format.rule
    values, scale = cache_format.fields[0], cache_format.fields[1]
    coded, scales = [], []
    for group in row[: values.count].float().reshape(scale.count, -1):
        step = torch.clamp(group.abs().max(), min=rule.amax_floor) / rule.fp8_max
        if rule.power_of_two and isfinite(step):  # a NaN stays one, in the scale as in the values
            mantissa, exponent = frexp(float(step))
            step = torch.tensor(ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent), dtype=torch.float32)
        coded.append(_encode_fp8((group / step).clamp(-rule.fp8_max, rule.fp8_max), cache_format.encoding))
        scales.append(float(step))
    fields = {"values": bytes(torch.cat(coded).tolist()), "scale": struct.pack(f"<{len(scales)}f", *scales)}
    if len(cache_format.fields) > 2:
        fields["rope"] = _raw(row[values.count :], "bf16")
    return fields


def _raw(values: torch.Tensor, dtype: str) -> bytes:
    return bytes(values.to(_CODES[dtype][0]).contiguous().view(torch.uint8).tolist())


def field_bytes(view: CacheView, slot: Slots, field: Field) -> tuple[Slots, int]:
    """First byte of a field of one row (or of each of many), counted from the start of the storage, and how many."""
    block, row = slot // view.block_size, slot % view.block_size
    earlier = 0
    for other in view.format.fields:
        if other.name == field.name:
            break
        earlier += other.nbytes
    inside = (
        earlier * view.block_size + row * field.nbytes if view.format.planar else row * view.format.row_bytes + earlier
    )
    return view.offset_bytes + block * view.block_stride_bytes + inside, field.nbytes


def decode_rows(view: CacheView, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logical rows ``[N, width] f64`` without index scales, and the scales ``[N] f64`` (1 where there are none).

    For ``fp8_ds_mla`` the group scales are applied; an index key's scale belongs to the score, so it is kept apart.
    """
    storage = torch.empty(0, dtype=torch.uint8, device=view.storage.device).set_(view.storage.untyped_storage())
    parts: dict[str, torch.Tensor] = {}
    for field in view.format.fields:
        starts, _ = field_bytes(view, torch.tensor(slots, dtype=torch.int64), field)
        where = (starts[:, None] + torch.arange(field.nbytes)).to(storage.device)
        raw = storage[where].cpu()
        if field.dtype.startswith("fp8"):
            parts[field.name] = torch.tensor(fp8_values(field.dtype), dtype=torch.float64)[raw.long()]
        else:
            parts[field.name] = raw.flatten().view(_CODES[field.dtype][0]).double().reshape(len(slots), field.count)
    if "rope" in parts:
        groups = parts["values"].unflatten(1, (parts["scale"].shape[1], -1))
        latent = (groups * parts["scale"][:, :, None]).flatten(1)
        return torch.cat((latent, parts["rope"]), 1), torch.ones(len(slots), dtype=torch.float64)
    scale = parts["scale"][:, 0] if "scale" in parts else torch.ones(len(slots), dtype=torch.float64)
    return parts["values"], scale
