"""Known kinds of fault, put into eager at the place where each would arise, to show that a check catches them.

Every one passes at short length: with one call, few tokens or no ties nothing is wrong.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..backends.eager import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ..batch import BatchLayout, Chunk
    from ..cache import CacheView

_TILE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A kind of fault.

    Attributes:
        stage: the first stage in which it shows.
        inject: a context in which eager has it. Not for threads; contexts may nest.
    """

    name: str
    what: str
    stage: str
    inject: Callable[[], AbstractContextManager[None]]


@contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _tie_order_by_tile() -> Iterator[None]:
    """In every second tile of rows of a call, ties go to the higher position."""
    score, pick, tile = select.Select._score, select.pick, [0]  # noqa: SLF001 (a fault needs the real site)

    def watched(kernel: select.Select, q: torch.Tensor, weights: torch.Tensor, chunk: Chunk, *rest: Any) -> None:
        tile[0] = chunk.start // _TILE
        score(kernel, q, weights, chunk, *rest)

    def untied(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, bool]:
        if tile[0] % 2 == 0:
            return pick(scores, topk)
        mirrored, only_nan = pick(scores.flip(0), topk)
        return (scores.numel() - 1 - mirrored).flip(0), only_nan

    with _patched(select.Select, "_score", watched), _patched(select, "pick", untied):
        yield


@contextmanager
def _causal_limit_off_by_one() -> Iterator[None]:
    """Each token also sees its successor, where the call holds it."""
    call = select.Select.__call__

    def widened(
        kernel: select.Select, q: torch.Tensor, weights: torch.Tensor, view: CacheView, batch: BatchLayout, *rest: Any
    ) -> None:
        visible = torch.where(batch.visible_lens > 0, batch.visible_lens + 1, 0)
        call(kernel, q, weights, view, replace(batch, visible_lens=visible), *rest)

    with _patched(select.Select, "__call__", widened):
        yield


@contextmanager
def _stale_gather() -> Iterator[None]:
    """Keys gathered for a request are taken for those of its next call, which has more."""
    gather_keys, last = select._gather_keys, [(0, -1)]  # noqa: SLF001

    def reused(view: CacheView, blocks: torch.Tensor, span: int, scratch: Mapping[str, torch.Tensor]) -> None:
        key = scratch["keys"].data_ptr(), int(blocks[0])
        if key != last[0]:
            gather_keys(view, blocks, span, scratch)
        last[0] = key

    with _patched(select, "_gather_keys", reused):
        yield


def _instead_of_pick(wrong: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """A fault that selects ``wrong(right positions, number of visible keys)`` in place of the right positions."""

    @contextmanager
    def inject() -> Iterator[None]:
        pick = select.pick

        def replaced(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, bool]:
            right, only_nan = pick(scores, topk)
            return wrong(right, scores.numel()), only_nan

        with _patched(select, "pick", replaced):
            yield

    return inject


CHUNKING = (
    Fault(
        name="tie-order-by-tile",
        what="the order of equal scores depends on the tile in which a row is computed",
        stage="select",
        inject=_tie_order_by_tile,
    ),
    Fault(
        name="causal-limit-off-by-one",
        what="a token sees its successor",
        stage="select",
        inject=_causal_limit_off_by_one,
    ),
    Fault(
        name="stale-gather",
        what="gathered keys of an earlier chunk are reused for a later one",
        stage="select",
        inject=_stale_gather,
    ),
)
"""Faults of chunked prefill."""

WRONG_SELECTIONS = (
    Fault(
        name="last-k",
        what="the most recent index_topk tokens are selected",
        stage="select",
        inject=_instead_of_pick(lambda right, visible: torch.arange(visible - right.numel(), visible)),
    ),
    Fault(
        name="first-k",
        what="the first index_topk tokens are selected",
        stage="select",
        inject=_instead_of_pick(lambda right, _visible: torch.arange(right.numel())),
    ),
    Fault(
        name="shifted-by-one",
        what="the successor of each token that should be selected",
        stage="select",
        inject=_instead_of_pick(lambda right, visible: ((right + 1) % visible).sort().values),
    ),
)
"""Selections that are wrong in every row which sees more than index_topk tokens: a control must notice them."""

FAULTS = (*CHUNKING, *WRONG_SELECTIONS)
