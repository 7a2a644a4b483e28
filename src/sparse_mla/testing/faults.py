"""Known kinds of fault, put into eager at the place where each would arise, to show that a check catches them.

Every one passes at short length: with one call, few tokens or no ties nothing is wrong.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..attention import SparseMLA
from ..backends.eager import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ..batch import BatchLayout, Chunk
    from ..cache import CacheView

_TILE = 64
_BIG = 2**31 - 1


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
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``replacement`` inside the context."""
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

    with patched(select.Select, "_score", watched), patched(select, "pick", untied):
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

    with patched(select.Select, "__call__", widened):
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

    with patched(select, "_gather_keys", reused):
        yield


def _wrong_answer(wrong: Callable[[_Answer], torch.Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """A fault of any backend: the right indices are replaced by ``wrong`` ones, as many in each row."""

    @contextmanager
    def inject() -> Iterator[None]:
        right = SparseMLA.select

        def replaced(
            operator: SparseMLA,
            q: torch.Tensor,
            weights: torch.Tensor,
            view: CacheView,
            batch: BatchLayout,
            *rest: Any,
            **named: Any,
        ) -> torch.Tensor:
            out = right(operator, q, weights, view, batch, *rest, **named)
            column, unused = torch.arange(out.shape[1], device=out.device), out < 0
            selected = (~unused).sum(1, keepdim=True)
            out.copy_(wrong(_Answer(out, column, selected, batch.visible_lens[:, None])).masked_fill(unused, -1))
            return out

        with patched(SparseMLA, "select", replaced):
            yield

    return inject


class _Answer(NamedTuple):
    """``indices [T, K]`` as selected, column numbers ``[K]``, and of each row ``[T, 1]`` how many it selected and sees."""

    indices: torch.Tensor
    column: torch.Tensor
    selected: torch.Tensor
    visible: torch.Tensor


def _successors(answer: _Answer) -> torch.Tensor:
    """Each selected position plus one, the last visible one going to 0; ascending, as selections are."""
    moved = torch.where(answer.indices < 0, _BIG, (answer.indices + 1) % answer.visible.clamp(min=1))
    return moved.sort(1).values


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
        inject=_wrong_answer(lambda answer: answer.visible - answer.selected + answer.column),
    ),
    Fault(
        name="first-k",
        what="the first index_topk tokens are selected",
        stage="select",
        inject=_wrong_answer(lambda answer: answer.column.expand_as(answer.indices)),
    ),
    Fault(
        name="shifted-by-one",
        what="the successor of each token that should be selected is",
        stage="select",
        inject=_wrong_answer(_successors),
    ),
)
"""Selections that are wrong in every row which sees more than index_topk tokens, on any backend: controls."""

FAULTS = (*CHUNKING, *WRONG_SELECTIONS)
