"""Faults of attend."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...backends.eager import attend
from ...backends.eager.gather import gather
from .fault import Fault, patched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ...cache import CacheView

_HEAD_TILE = 4


@contextmanager
def _one_scale_a_row() -> Iterator[None]:
    """A segment without a gap takes the fast way, which reads the first scale of a row for all its groups."""
    part, whole = attend.Attend._part, [False]  # noqa: SLF001 (a fault needs the real site)

    def watched(kernel: Any, q: Any, view: Any, slots: Any, valid: torch.Tensor, scratch: Any) -> Any:
        whole[0] = bool(valid.all())
        return part(kernel, q, view, slots, valid, scratch)

    def coarse(view: CacheView, name: str, slots: Any, out: torch.Tensor, stored: Any) -> None:
        gather(view, name, slots, out, stored)
        if name == "scale" and whole[0]:
            out.copy_(out[:, :1].clone().expand_as(out))

    with patched(attend.Attend, "_part", watched), patched(attend, "gather", coarse):
        yield


@contextmanager
def _first_row_for_minus_one() -> Iterator[None]:
    """−1 is masked in the first segment of a row's indices; in later ones it reads position 0."""
    tile, part, later = attend.Attend._tile, attend.Attend._part, [False]  # noqa: SLF001

    def started(kernel: Any, *args: Any) -> Any:
        later[0] = False
        return tile(kernel, *args)

    def unmasked(kernel: Any, q: Any, view: Any, slots: Any, valid: torch.Tensor, scratch: Any) -> Any:
        mask = torch.ones_like(valid) if later[0] else valid
        later[0] = True
        return part(kernel, q, view, slots, mask, scratch)

    with patched(attend.Attend, "_tile", started), patched(attend.Attend, "_part", unmasked):
        yield


def _neighbouring_head() -> AbstractContextManager[None]:
    """Where a rank has no multiple of four heads, segments after the first are merged into the next head."""
    merge = attend._merge  # noqa: SLF001

    def moved(run: Any, busy: torch.Tensor, part: Any) -> None:
        if run.mass.shape[1] % _HEAD_TILE and bool((run.mass[busy] != 0).any()):
            part = type(part)(*(field.roll(1, 1) for field in part))
        merge(run, busy, part)

    return patched(attend, "_merge", moved)


OUTPUTS = (
    Fault(
        name="wrong-scale-granularity",
        what="one fp8 scale for a whole latent row instead of one per 128 values",
        stage="attend",
        nets=("plans", "reference"),
        inject=_one_scale_a_row,
    ),
    Fault(
        name="slot-zero-for-minus-one",
        what="an unused index reads a real row",
        stage="attend",
        nets=("reference",),
        inject=_first_row_for_minus_one,
    ),
    Fault(
        name="head-mapping-under-tp",
        what="partial results go to another head when a rank's heads do not fill a tile",
        stage="attend",
        nets=("reference",),
        inject=_neighbouring_head,
    ),
)
