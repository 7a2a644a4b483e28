"""Faults of select."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...attention import SparseMLA
from ...backends.eager import select
from .fault import PASS, Fault, patched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ...batch import BatchLayout, Chunk
    from ...cache import CacheView

_BIN_BITS = 16
_JUNK = 0x7F7F7F7F
_BIG = 2**31 - 1


@contextmanager
def _tie_order_by_tile() -> Iterator[None]:
    """In every second pass over the rows of a call, ties go to the higher position."""
    score, pick, tile = select.Select._score, select.pick, [0]  # noqa: SLF001 (a fault needs the real site)

    def watched(kernel: select.Select, q: torch.Tensor, weights: torch.Tensor, chunk: Chunk, *rest: Any) -> None:
        tile[0] = chunk.start // PASS
        score(kernel, q, weights, chunk, *rest)

    def untied(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, bool]:
        if tile[0] % 2 == 0:
            return pick(scores, topk)
        mirrored, only_nan = pick(scores.flip(0), topk)
        return (scores.numel() - 1 - mirrored).flip(0), only_nan

    with patched(select.Select, "_score", watched), patched(select, "pick", untied):
        yield


def _bins_overflow() -> AbstractContextManager[None]:
    """The radix bin of the k-th score has room for one pass of candidates; later ones overwrite the first."""
    pick = select.pick

    def overflowing(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, bool]:
        picked, only_nan = pick(scores, topk)
        if picked.numel() < topk:
            return picked, only_nan
        bins = scores.view(torch.int32) >> _BIN_BITS
        kth = bins[picked[scores[picked].argmin()]]
        candidates = (bins == kth).nonzero().squeeze(-1)[-PASS:]
        above = picked[bins[picked] != kth]
        order = scores[candidates].sort(descending=True, stable=True).indices[: topk - above.numel()]
        return torch.cat((above, candidates[order])).sort().values, only_nan

    return patched(select, "pick", overflowing)


def _stale_gather() -> AbstractContextManager[None]:
    """Keys gathered for a request that needs more than one pass are taken for those of its next call, which has more."""
    gather_keys, last = select._gather_keys, [(0, -1)]  # noqa: SLF001

    def reused(view: CacheView, blocks: torch.Tensor, span: int, scratch: Mapping[str, torch.Tensor]) -> None:
        key = scratch["keys"].data_ptr(), int(blocks[0])
        if span <= PASS or key != last[0]:
            gather_keys(view, blocks, span, scratch)
        last[0] = key if span > PASS else (0, -1)

    return patched(select, "_gather_keys", reused)


def _evicted_block() -> AbstractContextManager[None]:
    """The keys of a full block are kept by its number, and found again after the block was given to other tokens."""
    gather_keys = select._gather_keys  # noqa: SLF001
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def remembered(view: CacheView, blocks: torch.Tensor, span: int, scratch: Mapping[str, torch.Tensor]) -> None:
        gather_keys(view, blocks, span, scratch)
        for place, block in enumerate(blocks[: span // view.block_size].tolist()):
            here = scratch["keys"][place * view.block_size : (place + 1) * view.block_size]
            here.copy_(kept.setdefault((view.storage.data_ptr(), block), here.clone()))

    return patched(select, "_gather_keys", remembered)


def _call(wrong: Callable[..., None]) -> AbstractContextManager[None]:
    """``wrong(right, kernel, index_q, weights, view, batch, out, lens, flags, scratch)`` in the place of the kernel."""
    right = select.Select.__call__

    def called(kernel: select.Select, *args: Any) -> None:
        wrong(right, kernel, *args)

    return patched(select.Select, "__call__", called)


def _causal_limit_off_by_one() -> AbstractContextManager[None]:
    """From the second pass of a call on, each token also sees its successor, where the call holds it."""

    def widened(right: Any, kernel: Any, q: Any, weights: Any, view: CacheView, batch: BatchLayout, *rest: Any) -> None:
        later = torch.arange(batch.num_tokens, device=batch.visible_lens.device) >= PASS
        visible = torch.where(later & (batch.visible_lens > 0), batch.visible_lens + 1, batch.visible_lens)
        right(kernel, q, weights, view, replace(batch, visible_lens=visible), *rest)

    return _call(widened)


def _uninitialised_tail() -> AbstractContextManager[None]:
    """What is left of a call after its whole passes is not computed: rows keep what their memory held (here always 7f)."""

    def cut(
        right: Any,
        kernel: Any,
        q: Any,
        weights: Any,
        view: Any,
        batch: BatchLayout,
        out: torch.Tensor,
        lens: torch.Tensor,
        *rest: Any,
    ) -> None:
        right(kernel, q, weights, view, batch, out, lens, *rest)
        start = 0
        for count in batch.query_lens:
            if count > PASS:
                tail = slice(start + count // PASS * PASS, start + count)
                out[tail], lens[tail] = _JUNK, 0
            start += count

    return _call(cut)


def _plan_under_too_small_a_key() -> AbstractContextManager[None]:
    """What a long call sees is kept under its sizes and whether something came before it: right for two chunks."""
    kept: dict[tuple[Any, ...], BatchLayout] = {}

    def cached(right: Any, kernel: Any, q: Any, weights: Any, view: Any, batch: BatchLayout, *rest: Any) -> None:
        if batch.max_query_len > PASS:
            prefixed = tuple(length > count > 0 for count, length in zip(batch.query_lens, batch.seq_lens, strict=True))
            key = kernel, batch.query_lens, prefixed
            first = kept.setdefault(key, batch)
            batch = replace(batch, visible_lens=first.visible_lens, seq_lens=first.seq_lens)
        right(kernel, q, weights, view, batch, *rest)

    return _call(cached)


def _absolute_for_relative() -> AbstractContextManager[None]:
    """Where a request needs more than one pass, its indices count from the start of the gather of the whole batch."""

    def shifted(
        right: Any, kernel: Any, q: Any, weights: Any, view: Any, batch: BatchLayout, out: torch.Tensor, *rest: Any
    ) -> None:
        right(kernel, q, weights, view, batch, out, *rest)
        start = before = 0
        for count, length in zip(batch.query_lens, batch.seq_lens, strict=True):
            if count > PASS:
                rows = out[start : start + count]
                rows.add_(torch.where(rows >= 0, before, 0))
            start, before = start + count, before + length

    return _call(shifted)


class _Answer(NamedTuple):
    """``indices [T, K]`` as selected, column numbers ``[K]``, and of each row ``[T, 1]`` how many it selected and sees."""

    indices: torch.Tensor
    column: torch.Tensor
    selected: torch.Tensor
    visible: torch.Tensor


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


def _successors(answer: _Answer) -> torch.Tensor:
    """Each selected position plus one, the last visible one going to 0; ascending, as selections are."""
    moved = torch.where(answer.indices < 0, _BIG, (answer.indices + 1) % answer.visible.clamp(min=1))
    return moved.sort(1).values


def _select(name: str, what: str, inject: Callable[[], AbstractContextManager[None]], *nets: str) -> Fault:
    return Fault(name=name, what=what, stage="select", nets=nets, inject=inject)


SELECTIONS = (
    _select("stale-gather", "gathered keys of an earlier chunk serve a later one", _stale_gather, "plans", "reference"),
    _select(
        "uninitialised-tail",
        "the rows after the last whole pass are never written",
        _uninitialised_tail,
        "plans",
        "reference",
        "count",
    ),
    _select(
        "causal-limit-off-by-one", "a token sees its successor", _causal_limit_off_by_one, "plans", "reference", "count"
    ),
    _select(
        "tie-order-by-tile",
        "the order of equal scores depends on the pass in which a row is computed",
        _tie_order_by_tile,
        "plans",
        "reference",
    ),
    _select("radix-bin-overflow", "more near-equal scores than a bin has room for", _bins_overflow, "reference"),
    _select(
        "plan-under-too-small-a-key",
        "right for two chunks, wrong from the third",
        _plan_under_too_small_a_key,
        "plans",
        "reference",
    ),
    _select(
        "absolute-for-relative",
        "indices count from the start of the batch instead of the request",
        _absolute_for_relative,
        "plans",
        "reference",
    ),
    _select(
        "evicted-prefix-block",
        "keys of a cached block are used after it was given to other tokens",
        _evicted_block,
        "plans",
        "reference",
    ),
)

LAST_K = _select(
    "last-k",
    "the most recent index_topk tokens are selected",
    _wrong_answer(lambda answer: answer.visible - answer.selected + answer.column),
    "reference",
)

WRONG_SELECTIONS = (
    LAST_K,
    _select(
        "first-k",
        "the first index_topk tokens are selected",
        _wrong_answer(lambda answer: answer.column.expand_as(answer.indices)),
        "reference",
    ),
    _select("shifted-by-one", "the successor of each right token is selected", _wrong_answer(_successors), "reference"),
)
"""Selections that are wrong in every row which sees more than index_topk tokens, on any backend: controls."""
