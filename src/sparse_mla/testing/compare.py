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
    from collections.abc import Callable, Sequence

    from ..errors import SparseMLAError

UNIT = 2.0**-24
_FP8_UNIT = 2.0**-12
"""Rounding of a sum of fp8 products on matrix units, relative to Σ|terms|: they keep about 13 bits below the largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A failed comparison: which row, and what differs."""

    what: str
    row: int
    detail: str

    def __str__(self) -> str:
        return f"{self.what} differs at row {self.row}: {self.detail}"


class ConformanceError(AssertionError):
    """A clause of the contract is broken."""


def demand(difference: Difference | None, where: str = "") -> None:
    """Fail with the difference, if there is one."""
    if difference is not None:
        raise ConformanceError(f"{where}: {difference}" if where else str(difference))


def require(condition: object, message: str) -> None:
    """Fail with ``message`` unless the condition holds."""
    if not condition:
        raise ConformanceError(message)


def refusal(call: Callable[[], object], error: type[SparseMLAError], what: str) -> str:
    """The message with which ``call`` refuses; fail when it does not."""
    try:
        call()
    except error as refused:
        return str(refused)
    raise ConformanceError(f"{what} was accepted")


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
    size = keys.double().abs() @ (index_weights.double().abs() @ index_q.double().abs())
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
    scores: torch.Tensor | None = None,
    matrix_units: bool = False,
) -> Difference | None:
    """Judge one row of select by the reference's own scores over the visible keys.

    Args:
        indices: ``[K] i32``, as select wrote it.
        keys: ``[S, D_i]`` the visible keys, S may be 0.
        exact: demand the reference's indices (inputs whose sums are exact in any order); otherwise every selected key
            must score no less, and every other no more, than the reference's k-th score give or take the bound.
        scores: ``[S] f64`` from the reference, where the caller has them already.
        matrix_units: fp8 may have been multiplied by units that align products before they add them.
    """
    if scores is None:
        scores = reference_select.scores(index_q, index_weights, keys, k_scale)
    chosen = indices[indices >= 0].long().cpu()
    wanted = reference_select.top(scores, indices.numel())
    fault = _malformed(indices, chosen, wanted.numel(), keys.shape[0])
    if not fault and not torch.equal(chosen, wanted):
        if exact:
            at = int((chosen != wanted).nonzero()[0])
            fault = f"index {at} is {int(chosen[at])}, wanted {int(wanted[at])}"
        else:
            bound = score_bound(index_q, index_weights, keys, k_scale)
            if matrix_units and index_q.element_size() == 1:
                bound = bound * (_FP8_UNIT / UNIT / (index_q.shape[-1] + index_q.shape[0] + 2))
            fault = _misjudged(chosen, wanted, scores, bound)
    return Difference(what="selected indices", row=row, detail=fault) if fault else None


def _malformed(indices: torch.Tensor, chosen: torch.Tensor, count: int, visible: int) -> str:
    """What is wrong with the form of a row of indices, before any score is looked at."""
    if bool((indices[chosen.numel() :] != -1).any()) or bool((chosen.diff() <= 0).any()):
        return "not ascending with −1 in the tail"
    if chosen.numel() and int(chosen[-1]) >= visible:
        return f"position {int(chosen[-1])} with {visible} visible keys"
    return "" if chosen.numel() == count else f"{chosen.numel()} indices, wanted {count}"


def _misjudged(chosen: torch.Tensor, wanted: torch.Tensor, scores: torch.Tensor, bound: torch.Tensor) -> str:
    """The first position that no rounding excuses: selected though too low, or left out though too high."""
    kth, slack = scores[wanted].min(), bound + bound[wanted].max()
    taken = torch.zeros(scores.numel(), dtype=torch.bool)
    taken[chosen] = True
    wrong = torch.where(taken, scores < kth - slack, scores > kth + slack) & ~scores.isnan() | (taken & scores.isnan())
    if not bool(wrong.any()):
        return ""
    at = int(wrong.nonzero()[0])
    verb = "selected" if taken[at] else "left out"
    return f"position {at} was {verb} with score {scores[at]:.9g}; the k-th best is {kth:.9g} ± {slack[at]:.2g}"


def check_attention(
    row: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    latent: torch.Tensor,
    softmax_scale: float,
    *,
    matrix_units: bool = False,
) -> Difference | None:
    """Judge one row of attend: ``out [H, D_c]`` and ``lse [H]`` against float64 over ``latent [N, D_c + D_r]``.

    The bound: a score errs by δ = (D + 2) · u · Σ|q||k| · scale, a probability by a factor e^2δ, a sum of N weighted
    values by N · u more, and the output is rounded once to its dtype: half its spacing, at most eps / 2 of the value.
    With ``matrix_units`` probabilities are rounded to the values' dtype too, once each.
    """
    wanted, wanted_lse = reference_attend.attend(q, latent, softmax_scale, out.shape[-1])
    got = out.double().cpu()
    if not torch.equal(got.isnan(), wanted.isnan()):
        return Difference(what="attention output", row=row, detail="NaN in other places than the reference")
    if latent.shape[0] == 0:
        empty = bool((out == 0).all()) and (lse is None or bool((lse == -torch.inf).all()))
        detail = "a row without keys must be 0 with lse −inf"
        return None if empty else Difference(what="attention output", row=row, detail=detail)
    size = (q.double().abs() @ latent.double().abs().T * softmax_scale).amax(-1)
    score_error = (q.shape[-1] + 2) * UNIT * size
    weights = (q.double() @ latent.double().T * softmax_scale - wanted_lse[:, None]).exp()
    spread = weights @ latent[:, : out.shape[-1]].double().abs()
    relative = torch.expm1(2 * score_error) + (latent.shape[0] + 16) * UNIT
    if matrix_units and out.dtype != torch.float32:
        relative = relative + torch.finfo(out.dtype).eps / 2
    bound = relative[:, None] * spread + torch.finfo(out.dtype).eps * wanted.abs() / 2 * 1.01 + 1e-30
    fault = _beyond(got, wanted, bound)
    if fault:
        return Difference(what="attention output", row=row, detail=fault)
    if lse is None:
        return None
    allowed = score_error + (latent.shape[0] + 16) * UNIT + 2 * UNIT * wanted_lse.abs()
    fault = _beyond(lse.double().cpu(), wanted_lse, allowed)
    return Difference(what="lse", row=row, detail=fault) if fault else None


def _beyond(got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor) -> str:
    """The first element further from the reference than its bound; infinities must be equal, NaN in the same places."""
    wrong = torch.where(wanted.isfinite(), ~((got - wanted).abs() <= bound), got != wanted) & ~wanted.isnan()
    if not bool(wrong.any()):
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"element {list(at)} is {got[at]:.9g}, wanted {wanted[at]:.9g} ± {bound[at]:.2g}"


def check_same(what: str, runs: Sequence[torch.Tensor]) -> Difference | None:
    """All tensors equal to the first in every bit."""
    for other in runs[1:]:
        difference = first_difference(what, other, runs[0])
        if difference is not None:
            return difference
    return None
