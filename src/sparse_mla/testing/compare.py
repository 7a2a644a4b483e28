"""Comparison with the reference: bounds stated from reduction lengths and dtypes, and messages that say where.

u = 2^-24 is the rounding unit of fp32. A sum of n products in any order errs by at most n · u · Σ|terms| to first order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..reference import attend as reference_attend
from ..reference import select as reference_select

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = 2.0**-24
OUT_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}
"""Spacing of an output dtype relative to its value: rounding to nearest errs by at most half of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A failed comparison: which row, and what differs."""

    what: str
    row: int
    detail: str

    def __str__(self) -> str:
        return f"{self.what} differs at row {self.row}: {self.detail}"


def first_difference(what: str, got: torch.Tensor, wanted: torch.Tensor) -> Difference | None:
    """Bitwise comparison of two tensors of one shape, NaN included."""
    ours, theirs = (tensor.contiguous().flatten(1).view(torch.uint8) for tensor in (got, wanted))
    if torch.equal(ours, theirs):
        return None
    row = int((ours != theirs).any(1).nonzero()[0])
    column = int((ours[row] != theirs[row]).nonzero()[0]) // got.element_size()
    values = f"{got[row].flatten()[column].item()!r}, wanted {wanted[row].flatten()[column].item()!r}"
    return Difference(what=what, row=row, detail=f"element {column} is {values}")


def score_bound(
    index_q: torch.Tensor, index_weights: torch.Tensor, keys: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    """Largest fp32 error ``[S] f64`` of a score: D_i terms a product, H_i products, two scalings."""
    size = (index_q.double().abs() @ keys.double().abs().T * index_weights.double().abs()[:, None]).sum(0)
    return (index_q.shape[-1] + index_q.shape[0] + 2) * UNIT * size * k_scale.double().abs()


def check_selection(
    row: int,
    indices: torch.Tensor,
    index_q: torch.Tensor,
    index_weights: torch.Tensor,
    keys: torch.Tensor,
    k_scale: torch.Tensor,
    *,
    exact: bool = False,
) -> Difference | None:
    """Judge one row of select by the reference's own scores over the visible keys.

    Args:
        indices: ``[K] i32``, as select wrote it.
        keys: ``[S, D_i]`` the visible keys, S may be 0.
        exact: demand the reference's indices (inputs whose sums are exact in any order); otherwise every selected key
            must score no less, and every other no more, than the reference's k-th score give or take the bound.
    """
    chosen = indices[indices >= 0].long().cpu()
    count = chosen.numel()
    tail = indices[count:]
    if bool((tail != -1).any()) or bool((chosen.diff() <= 0).any()):
        return Difference(what="selected indices", row=row, detail="not ascending with −1 in the tail")
    if count and int(chosen[-1]) >= keys.shape[0]:
        detail = f"position {int(chosen[-1])} with {keys.shape[0]} visible keys"
        return Difference(what="selected indices", row=row, detail=detail)
    scores = reference_select.scores(index_q, index_weights, keys, k_scale)
    wanted = reference_select.top(scores, indices.numel())
    if count != wanted.numel():
        return Difference(what="selected indices", row=row, detail=f"{count} indices, wanted {wanted.numel()}")
    if torch.equal(chosen, wanted):
        return None
    if exact:
        at = int((chosen != wanted).nonzero()[0])
        detail = f"index {at} is {int(chosen[at])}, wanted {int(wanted[at])}"
        return Difference(what="selected indices", row=row, detail=detail)
    kth, bound = scores[wanted].min(), score_bound(index_q, index_weights, keys, k_scale)
    taken = torch.zeros(keys.shape[0], dtype=torch.bool)
    taken[chosen] = True
    slack = bound + bound[wanted].max()
    wrong = torch.where(taken, scores < kth - slack, scores > kth + slack) & ~scores.isnan() | (taken & scores.isnan())
    if not bool(wrong.any()):
        return None
    at = int(wrong.nonzero()[0])
    verb = "selected" if taken[at] else "left out"
    detail = f"position {at} was {verb} with score {scores[at]:.9g}; the k-th best is {kth:.9g} ± {slack[at]:.2g}"
    return Difference(what="selected indices", row=row, detail=detail)


def check_attention(
    row: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    latent: torch.Tensor,
    softmax_scale: float,
) -> Difference | None:
    """Judge one row of attend: ``out [H, D_c]`` and ``lse [H]`` against float64 over ``latent [N, D_c + D_r]``.

    The bound: a score errs by δ = (D + 2) · u · Σ|q||k| · scale, a probability by a factor e^2δ, a sum of N weighted
    values by N · u more, and the output is rounded once to its dtype.
    """
    rank = out.shape[-1]
    wanted, wanted_lse = reference_attend.attend(q, latent, softmax_scale, rank)
    got = out.double().cpu()
    if not torch.equal(got.isnan(), wanted.isnan()):
        return Difference(what="attention output", row=row, detail="NaN in other places than the reference")
    if latent.shape[0] == 0:
        if bool((out != 0).any()) or (lse is not None and bool((lse != -torch.inf).any())):
            return Difference(what="attention output", row=row, detail="a row without keys must be 0 with lse −inf")
        return None
    size = (q.double().abs() @ latent.double().abs().T * softmax_scale).amax(-1)
    score_error = (q.shape[-1] + 2) * UNIT * size
    weights = (q.double() @ latent.double().T * softmax_scale - wanted_lse[:, None]).exp()
    spread = weights @ latent[:, :rank].double().abs()
    relative = torch.expm1(2 * score_error) + (latent.shape[0] + 16) * UNIT
    bound = relative[:, None] * spread + OUT_UNIT[out.dtype] * wanted.abs() / 2 * 1.01 + 1e-30
    wrong = ((got - wanted).abs() > bound) & ~wanted.isnan()
    if bool(wrong.any()):
        head, column = (int(index) for index in wrong.nonzero()[0])
        values = f"{got[head, column]:.9g}, wanted {wanted[head, column]:.9g} ± {bound[head, column]:.2g}"
        return Difference(what="attention output", row=row, detail=f"head {head} column {column} is {values}")
    if lse is None:
        return None
    error = (lse.double().cpu() - wanted_lse).abs()
    allowed = score_error + (latent.shape[0] + 16) * UNIT + 2 * UNIT * wanted_lse.abs()
    bad = (error > allowed) & wanted_lse.isfinite()
    if bool(bad.any()):
        head = int(bad.nonzero()[0])
        values = f"{lse[head]:.9g}, wanted {wanted_lse[head]:.9g} ± {allowed[head]:.2g}"
        return Difference(what="lse", row=row, detail=f"head {head} is {values}")
    return None


def check_same(what: str, runs: Sequence[torch.Tensor]) -> Difference | None:
    """All tensors equal to the first in every bit."""
    for other in runs[1:]:
        difference = first_difference(what, other, runs[0])
        if difference is not None:
            return difference
    return None
