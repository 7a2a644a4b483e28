"""attend in torch: gather the selected rows of a few tokens, reduce them segment by segment, merge in order.

Every product has one shape, whatever the call, and segments start at fixed places of the index list; a segment without
an index is skipped, which changes no bit. So a row is reduced in one order whether prefill or decode computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from .gather import gather
from .scratch import ATTEND_ROWS, segment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...batch import BatchLayout
    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem


class _Running(NamedTuple):
    """Online softmax of N tokens: maximum ``[N, H]``, mass ``[N, H]``, unnormalised output ``[N, H, D_c]``."""

    peak: torch.Tensor
    mass: torch.Tensor
    total: torch.Tensor


class Attend:
    """AttendKernel for every geometry."""

    def __init__(self, problem: Problem, device: Device) -> None:
        del device
        self._rank = problem.dims.kv_lora_rank
        self._segment = segment(problem.dims.index_topk)
        # The first attend of a busy, fresh process could have other bits than the later ones: most likely exp, which several
        # threads set up at once. After a call on one thread none had (scripts/first_attend.py).
        one = torch.ones(1)
        one.exp()
        one.log()

    def warm_up(self, where: torch.device) -> None:
        """Nothing to compile."""

    def __call__(
        self,
        q: torch.Tensor,
        view: CacheView,
        indices: torch.Tensor,
        batch: BatchLayout,
        softmax_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        if not batch.block_table.numel():  # nobody has a block: every row is empty
            out.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
            return
        last, reach = batch.num_requests - 1, batch.block_table.shape[1] * view.block_size
        missing = -indices.shape[1] % self._segment
        for first in range(0, batch.num_tokens, ATTEND_ROWS):
            rows = slice(first, first + ATTEND_ROWS)
            requests = batch.req_id_per_token[rows].long()
            wanted = pad(indices[rows].long(), (0, missing), value=-1)
            known = ((requests >= 0) & (requests <= last)).unsqueeze(-1)
            valid = (wanted >= 0) & (wanted < reach) & known
            tables = batch.block_table[requests.clamp(0, last)].long()
            slots = _slots(torch.where(valid, wanted, 0), tables, view.block_size)
            run = self._tile(q[rows].float() * softmax_scale, view, slots, valid, scratch)
            seen = run.mass != 0
            out[rows] = run.total / torch.where(seen, run.mass, 1.0).unsqueeze(-1)
            if lse is not None:
                lse[rows] = torch.where(seen, run.peak + run.mass.log(), -torch.inf)

    def _tile(
        self,
        queries: torch.Tensor,
        view: CacheView,
        slots: torch.Tensor,
        valid: torch.Tensor,
        scratch: Mapping[str, torch.Tensor],
    ) -> _Running:
        count, heads = queries.shape[:2]
        run = _Running(
            torch.full((count, heads), -torch.inf, dtype=torch.float32, device=queries.device),
            torch.zeros(count, heads, dtype=torch.float32, device=queries.device),
            scratch["total"][:count].zero_(),
        )
        for first in range(0, slots.shape[1], self._segment):
            here = slice(first, first + self._segment)
            busy = valid[:, here].any(-1).nonzero().squeeze(-1)
            if busy.numel():
                part = self._part(queries[busy], view, slots[busy, here], valid[busy, here], scratch)
                _merge(run, busy, part)
        return run

    def _part(
        self,
        queries: torch.Tensor,
        view: CacheView,
        slots: torch.Tensor,
        valid: torch.Tensor,
        scratch: Mapping[str, torch.Tensor],
    ) -> _Running:
        """One segment of each token."""
        count, heads = queries.shape[:2]
        latent, scores, total = (scratch[name][:count] for name in ("latent", "scores", "part"))
        self._load(view, slots.reshape(-1), latent.flatten(0, 1), scratch["stored"])
        if not bool(valid.all()):
            latent[~valid] = 0.0  # a stale row may hold NaN, and 0 * NaN is NaN
        for token in range(count):
            torch.mm(latent[token], queries[token].T, out=scores[token])
        scores.masked_fill_(~valid.unsqueeze(-1), -torch.inf)
        peak = scores.amax(1)
        scores.sub_(_finite(peak).unsqueeze(1)).exp_()
        mass = torch.empty(count, heads, 1, dtype=torch.float32, device=queries.device)
        ones = latent.new_ones(self._segment, 1)
        for token in range(count):
            weights = scores[token].T
            torch.mm(weights, latent[token][:, : self._rank], out=total[token])
            torch.mm(weights, ones, out=mass[token])  # sum() may reduce in another order in another tile size
        return _Running(peak, mass.squeeze(-1), total)

    def _load(self, view: CacheView, slots: torch.Tensor, latent: torch.Tensor, stored: torch.Tensor) -> None:
        """Cache rows ``slots [N]`` as fp32 into ``latent [N, D_c + D_r]``."""
        if view.format.name == "plain":
            gather(view, "values", slots, latent, stored)
            return
        groups = view.format.place("scale", view.block_size)[0].count
        scale = latent.new_empty(slots.numel(), groups)
        gather(view, "scale", slots, scale, stored)
        gather(view, "values", slots, latent[:, : self._rank], stored)
        gather(view, "rope", slots, latent[:, self._rank :], stored)
        latent[:, : self._rank].unflatten(1, (groups, -1)).mul_(scale.unsqueeze(-1))


def _merge(run: _Running, busy: torch.Tensor, part: _Running) -> None:
    peak = torch.maximum(run.peak[busy], part.peak)
    keep, add = (run.peak[busy] - _finite(peak)).exp(), (part.peak - _finite(peak)).exp()
    run.total[busy] = run.total[busy] * keep.unsqueeze(-1) + part.total * add.unsqueeze(-1)
    run.mass[busy] = run.mass[busy] * keep + part.mass * add
    run.peak[busy] = peak


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: −inf − (−inf) would be NaN, so where nothing was seen it is 0 and exp(−inf) = 0."""
    return torch.where(peak == -torch.inf, 0.0, peak)


def _slots(positions: torch.Tensor, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Physical slots ``[N, S]`` of positions ``[N, S]`` under block tables ``[N, B]``."""
    return torch.gather(tables, 1, positions // block_size) * block_size + positions % block_size
