"""Score sets that resemble real prompts or attack a top-k: clustered, tied, close, infinite, NaN. Seeded and exact.

A set becomes index keys whose scores are exactly its values, so a selection can be compared index by index. Winners in
real prompts are not scattered like random numbers: they cluster at the end, at the start and in spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..cache import CacheFormat

_SIGNIFICANT = {"f32": 24, "bf16": 8, "f16": 11, "fp8": 4, "fp8fnuz": 4}
"""Bits of a value that survive in a key, the leading one included."""


def _noise(count: int, source: torch.Generator) -> torch.Tensor:
    return torch.rand(count, generator=source) + 2.0**-6


def all_equal(count: int, source: torch.Generator) -> torch.Tensor:
    """Every score ties."""
    del source
    return torch.ones(count)


def few_nonzero(count: int, source: torch.Generator) -> torch.Tensor:
    """ReLU's exact zeros, but for five."""
    values = torch.zeros(count)
    values[torch.randint(0, max(count, 1), (5,), generator=source) % max(count, 1)] = 1.0
    return values


def signed_zeros(count: int, source: torch.Generator) -> torch.Tensor:
    """+0.0 and −0.0, which are equal, and a few below."""
    draw = torch.randint(0, 8, (count,), generator=source)
    return torch.where(draw == 0, -1.0, torch.where(draw < 4, 0.0, -0.0))


def levels(count: int, source: torch.Generator) -> torch.Tensor:
    """Eight levels, as fp8 keys give."""
    return torch.randint(0, 8, (count,), generator=source) / 8.0


def ascending(count: int, source: torch.Generator) -> torch.Tensor:
    """The best come last."""
    del source
    return torch.arange(1, count + 1) / max(count, 1)


def descending(count: int, source: torch.Generator) -> torch.Tensor:
    """The best come first."""
    return ascending(count, source).flip(0)


def recent(count: int, source: torch.Generator) -> torch.Tensor:
    """Noise, and most winners among the last sixteenth."""
    values = _noise(count, source)
    return torch.where(torch.arange(count) >= count - count // 16, values + 1.0, values)


def sinks(count: int, source: torch.Generator) -> torch.Tensor:
    """Four enormous scores at the start."""
    values = _noise(count, source)
    values[:4] = 512.0
    return values


def hot_spans(count: int, source: torch.Generator) -> torch.Tensor:
    """Winners in three short spans, all in few segments of any tiling."""
    values = _noise(count, source)
    for start in torch.randint(0, max(count, 1), (3,), generator=source).tolist():
        values[start : start + count // 24 + 1] += 2.0
    return values


def close(count: int, source: torch.Generator) -> torch.Tensor:
    """Values that differ in their last bits alone: one bin of any radix pass over the leading ones."""
    return 1.0 + torch.randperm(count, generator=source) % 4096 * 2.0**-23


def both_signs(count: int, source: torch.Generator) -> torch.Tensor:
    """Positive, negative and tied."""
    return torch.randint(-5, 6, (count,), generator=source) * 0.25


def infinities(count: int, source: torch.Generator) -> torch.Tensor:
    """+inf and −inf are ordinary scores, with ties among them."""
    draw = torch.randint(0, 12, (count,), generator=source)
    values = torch.where(draw == 0, torch.inf, _noise(count, source))
    return torch.where(draw > 7, -torch.inf, values)


def some_nan(count: int, source: torch.Generator) -> torch.Tensor:
    """One in three is NaN and never selected."""
    return torch.where(torch.randint(0, 3, (count,), generator=source) == 0, torch.nan, _noise(count, source))


def mostly_nan(count: int, source: torch.Generator) -> torch.Tensor:
    """Three numbers among NaN."""
    values = torch.full((count,), torch.nan)
    values[torch.randperm(count, generator=source)[:3]] = 0.5
    return values


def all_nan(count: int, source: torch.Generator) -> torch.Tensor:
    """Nothing can be selected, and a flag says so."""
    del source
    return torch.full((count,), torch.nan)


SCORE_SETS: tuple[Callable[[int, torch.Generator], torch.Tensor], ...] = (
    all_equal,
    few_nonzero,
    signed_zeros,
    levels,
    ascending,
    descending,
    recent,
    sinks,
    hot_spans,
    close,
    both_signs,
    infinities,
    some_nan,
    mostly_nan,
    all_nan,
)


def keys_with(scores: torch.Tensor, width: int, cache_format: CacheFormat) -> torch.Tensor:
    """Index keys ``[S, width] f32`` whose score against ``asking`` is exactly ``scores [S]``, rounded to the format."""
    keys = torch.zeros(scores.numel(), width)
    keys[:, 0] = _rounded(scores, _SIGNIFICANT[cache_format.encoding])
    return keys


def _rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(values)
    short = torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)
    return torch.where(values.isfinite(), short, values)


def asking(rows: int, heads: int, width: int, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and weights that read a key's first value with its sign: half of the heads see +k, half −k.

    Args:
        heads: even, half of it a power of two, so that every sum is exact.

    Returns:
        ``index_q [rows, heads, width]`` (fp8 where the keys are) and ``index_weights [rows, heads] f32``.
    """
    signs = torch.tensor([1.0, -1.0]).repeat(heads // 2)
    index_q = torch.zeros(rows, heads, width)
    index_q[:, :, 0] = signs
    weights = (signs * 2 / heads).repeat(rows, 1)
    dtype = {"fp8": torch.float8_e4m3fn, "fp8fnuz": torch.float8_e4m3fnuz}.get(encoding, torch.float32)
    return index_q.to(dtype), weights
