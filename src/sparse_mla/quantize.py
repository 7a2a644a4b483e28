"""The engines' fp8 rule in torch: one scale for a group of values, as a ``WriteRule`` states it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .cache import FP8_MAX, WriteRule
from .shapes import DTYPE_NAMES

if TYPE_CHECKING:
    from .cache import Field

_DECODE_ROWS = 256
"""Rows decoded at once: the temporaries stay in cache, and small beside any planned scratch."""


def quantize(values: torch.Tensor, rule: WriteRule, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the last dimension as one group.

    Args:
        values: ``[..., G] bf16|f16|f32``.
        rule: scale and clamp.
        encoding: ``fp8`` or ``fp8fnuz``.

    Returns:
        ``[..., G]`` in the encoding and ``[..., 1] f32`` scales. A NaN makes its group's scale and values NaN.
    """
    exact = values.float()
    scale = exact.abs().amax(-1, keepdim=True).clamp_min(rule.amax_floor) / rule.fp8_max
    if rule.power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent with mantissa in [0.5, 1)
        power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        scale = torch.where(scale.isfinite(), power, scale)
    coded = (exact / scale).clamp_(-rule.fp8_max, rule.fp8_max)
    return coded.to(getattr(torch, DTYPE_NAMES[encoding])), scale


def quantize_index_q(index_q: torch.Tensor, encoding: str = "fp8") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise index queries as vLLM does: a power-of-two scale for each head, amax floor 1e-10.

    Args:
        index_q: ``[T, H_i, D_i] bf16|f16|f32``.

    Returns:
        ``[T, H_i, D_i]`` in the encoding, and ``[T, H_i] f32`` scales, which the caller folds into ``index_weights``.
    """
    coded, scale = quantize(
        index_q, WriteRule(amax_floor=1e-10, fp8_max=FP8_MAX[encoding], power_of_two=True), encoding
    )
    return coded, scale.squeeze(-1)


def decode_fp8(stored: torch.Tensor, field: Field, out: torch.Tensor) -> None:
    """Decode fp8 bytes into fp32, exactly: every fp8 value times 2^k is an fp16 value with the same low bits.

    Both encodings are 1-4-3; moved into fp16's 1-5-10 they differ from their value by the difference of the biases
    (15 − 7, or 15 − 8 for fnuz). Integer operations vectorise where torch's own conversion is a scalar loop,
    five times slower.

    Args:
        stored: ``[N, G] u8``.
        field: its dtype names the encoding.
        out: ``[N, G] f32`` to fill.
    """
    fnuz = field.dtype == "fp8fnuz"
    for part, target in zip(stored.split(_DECODE_ROWS), out.split(_DECODE_ROWS), strict=True):
        # fnuz has one NaN, 0x80, which becomes 0 here; the other encoding has 0x7f and 0xff, which become 127.
        code = part ^ 0x80 if fnuz else part & 0x7F
        has_nan = int(code.amin()) == 0 if fnuz else int(code.amax()) == 0x7F
        wide = part.view(torch.int8).to(torch.int16)  # the sign reaches bit 15, and bit 14 too, which is cleared
        half = wide.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        target.copy_(half.view(torch.float16)).mul_(2.0**7 if fnuz else 2.0**8)
        if has_nan:
            target.masked_fill_(code == (0 if fnuz else 0x7F), float("nan"))
