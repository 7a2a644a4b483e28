"""Numbers as bytes: fp8 by integer arithmetic, where a device has none, and scores as integers that sort like them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(stored, ENCODING: tl.constexpr):
    """fp8 bytes as fp16, exactly; with ``ENCODING`` empty, values as they are.

    Both encodings are 1-4-3 bits. Moved into fp16's 1-5-10, a value is off by the difference of the exponent biases
    alone (15 − 7, or 15 − 8 for fnuz), subnormal values included.
    """
    if ENCODING == "":
        value = stored
    else:
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if ENCODING == "fp8fnuz":
            value = tl.where(bits == 0x80, float("nan"), half * 128.0).to(tl.float16)
        else:
            value = tl.where((bits & 0x7F) == 0x7F, float("nan"), half * 256.0).to(tl.float16)
    return value


@triton.jit
def encoded(value, ENCODING: tl.constexpr):
    """fp32 as fp8 bytes, to nearest with ties to even; ``value`` is already clamped to the encoding's range."""
    BIAS: tl.constexpr = 8 if ENCODING == "fp8fnuz" else 7
    LEAST_NORMAL: tl.constexpr = 2.0 ** (1 - BIAS)
    # Adding 2^(21 − BIAS) to a subnormal leaves its eighths of LEAST_NORMAL, rounded, in the lowest bits.
    MAGIC: tl.constexpr = 2.0 ** (21 - BIAS)
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - ((127 - BIAS) << 3)
    magnitude = size.to(tl.float32, bitcast=True)
    small = (magnitude + MAGIC).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < LEAST_NORMAL, small, normal)
    nan = value != value
    if ENCODING == "fp8fnuz":  # no negative zero: that byte is the NaN
        byte = tl.where(nan, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        byte = tl.where(nan, 0x7F, code) | sign
    return byte.to(tl.uint8)


@triton.jit
def ordered(score, valid):
    """fp32 scores as uint32 that compare alike, −0 equal to +0; 0 (below all of them) where invalid or NaN."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    return tl.where(valid & (score == score), key, 0)
