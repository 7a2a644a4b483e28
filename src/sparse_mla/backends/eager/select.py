"""select in torch: keys of a request gathered once, scored in fixed tiles, and an exact stable pick without a sort.

Every product has one shape, whatever the call: BLAS libraries change the order of a reduction with the shape (fp32
``torch.mm`` takes another path for one or two rows than for seven), and rows must not depend on their neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .gather import gather, slots_of
from .scratch import KEY_TILE, round_up, token_tile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...batch import BatchLayout, Chunk
    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

_SAMPLES = 4096


class Select:
    """SelectKernel for every geometry."""

    def __init__(self, problem: Problem, device: Device) -> None:
        del device
        self._dims = problem.dims

    def warm_up(self, where: torch.device) -> None:
        """Nothing to compile."""

    def __call__(
        self,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        view: CacheView,
        batch: BatchLayout,
        out: torch.Tensor,
        lens: torch.Tensor,
        flags: torch.Tensor,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        out.fill_(-1)
        lens.zero_()
        visible = batch.visible_lens.tolist()
        for chunk in batch.chunks(scratch["scores"].shape[0]):
            if chunk.gather:
                rows = slice(chunk.start, chunk.start + batch.query_lens[chunk.request])
                span = min(batch.seq_lens[chunk.request], max(visible[rows]))  # the host's lengths are upper bounds
                _gather_keys(view, batch.block_table[chunk.request], span, scratch)
            here = [min(seen, span) for seen in visible[chunk.start : chunk.stop]]
            if max(here, default=0) == 0:
                continue
            self._score(index_q, index_weights, chunk, max(here), scratch)
            for row, seen in enumerate(here):
                token = chunk.start + row
                picked, saw_only_nan = pick(scratch["scores"][row, :seen], out.shape[1])
                out[token, : picked.numel()] = picked
                lens[token] = picked.numel()
                flags += int(saw_only_nan)

    def _score(
        self,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        chunk: Chunk,
        span: int,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """Scores of the chunk's rows against the first ``span`` keys, into ``scratch["scores"]``."""
        heads = self._dims.index_n_heads
        tokens = token_tile(heads)
        rows = round_up(chunk.stop - chunk.start, tokens)
        queries = _padded(index_q[chunk.start : chunk.stop], rows).reshape(-1, tokens * heads, index_q.shape[-1])
        weights = _padded(index_weights[chunk.start : chunk.stop], rows).reshape(-1, tokens, heads, 1)
        products, scores = scratch["products"], scratch["scores"]
        for first in range(0, span, KEY_TILE):
            keys = scratch["keys"][first : first + KEY_TILE]
            for tile in range(rows // tokens):
                torch.mm(keys, queries[tile].T, out=products)
                products.relu_()
                by_token = products.view(KEY_TILE, tokens, heads).transpose(0, 1)
                block = scores[tile * tokens : (tile + 1) * tokens, first : first + KEY_TILE]
                torch.bmm(by_token, weights[tile], out=block.unsqueeze(-1))
            scores[:rows, first : first + KEY_TILE] *= scratch["scale"][first : first + KEY_TILE]


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """fp32 copy with zero rows added, so that the last tile has the shape of every tile."""
    full = torch.zeros(count, *rows.shape[1:], dtype=torch.float32, device=rows.device)
    full[: rows.shape[0]] = rows
    return full


def _gather_keys(view: CacheView, blocks: torch.Tensor, span: int, scratch: Mapping[str, torch.Tensor]) -> None:
    """Keys and scales of a request, once for all its chunks; the rest of the last tile is zeroed."""
    keys, scale = scratch["keys"], scratch["scale"]
    end = round_up(span, KEY_TILE)
    keys[span:end].zero_()
    scale[span:end].zero_()
    for first in range(0, span, KEY_TILE):
        last = min(first + KEY_TILE, span)
        slots = slots_of(torch.arange(first, last, device=blocks.device), blocks, view.block_size)
        gather(view, "values", slots, keys[first:last], scratch["stored"])
        if view.format.name == "plain":
            scale[first:last].fill_(1.0)
        else:
            gather(view, "scale", slots, scale[first:last].unsqueeze(-1), scratch["stored"])


def pick(scores: torch.Tensor, topk: int) -> tuple[torch.Tensor, bool]:
    """Positions of the ``topk`` best scores ``[S] f32``, ascending; ties go to the lower position, NaN never wins.

    Candidates are cut by a threshold taken from a strided sample. The cut keeps every score that reaches the threshold,
    so whenever at least ``topk`` remain the winners are among them, and when fewer do all are candidates: a bad sample
    costs time, never the result.

    Returns:
        ``[min(topk, non-NaN scores)] i64``, and whether there were scores but only NaN.
    """
    candidates = _cut(scores, topk)
    values = scores[candidates]
    if values.numel() > topk:
        kth = values.topk(topk, sorted=False).values.amin()
        above, ties = values > kth, values == kth
        room = topk - above.sum()
        candidates = candidates[above | (ties & (ties.cumsum(0) <= room))]
    return candidates, candidates.numel() == 0 and scores.numel() > 0


def _cut(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Ascending positions of a superset of the winners, without NaN."""
    stride = scores.numel() // _SAMPLES
    if stride > 1:
        sample = scores[::stride]
        rank = min(sample.numel(), topk * 5 // (4 * stride) + 16)
        threshold = sample.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        kept = (scores >= threshold.topk(rank, sorted=False).values.amin()).nonzero().squeeze(-1)
        if kept.numel() >= topk:
            return kept
    return (scores == scores).nonzero().squeeze(-1)  # noqa: PLR0124 (true unless NaN)
