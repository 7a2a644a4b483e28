"""Kernels with one fault each, of the kinds that public stacks had. The suite must catch every one."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparse_mla.backends.eager.attend import Attend
from sparse_mla.backends.eager.select import Select
from sparse_mla.backends.eager.write import Write
from sparse_mla.backends.table import TABLE
from sparse_mla.cache import FP8_MAX
from sparse_mla.problem import Stage

BROKEN = {}
"""name: (row, the clause that must catch it)."""


def broken(stage, clause):
    def add(kernel):
        base = next(row for row in TABLE if row.name == "eager" and row.stage == stage)
        BROKEN[kernel.__name__] = (replace(base, name=kernel.__name__, path=f"{__name__}:{kernel.__name__}"), clause)
        return kernel

    return add


class _Selecting(Select):
    """Runs the right kernel, then ``spoil`` changes what it answered."""

    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        super().__call__(index_q, index_weights, view, batch, out, lens, flags, scratch)
        self.spoil(view, batch, out, lens, scratch)

    def spoil(self, view, batch, out, lens, scratch):
        raise NotImplementedError


class _Asking(Select):
    """Changes what is asked, then runs the right kernel."""

    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        view, batch = self.twist(view, batch)
        super().__call__(index_q, index_weights, view, batch, out, lens, flags, scratch)

    def twist(self, view, batch):
        raise NotImplementedError


def _pick(scores, topk):
    """What a stable full sort picks."""
    order = torch.sort(scores, descending=True, stable=True).indices[:topk]
    return order.sort().values


class _Scoring(Select):
    """The right scores, another pick of each row's."""

    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        super().__call__(index_q, index_weights, view, batch, out, lens, flags, scratch)
        visible = batch.visible_lens.tolist()
        for chunk in batch.chunks(scratch["scores"].shape[0]):
            one = batch.take(torch.arange(chunk.start, chunk.stop), self._only(batch, chunk))
            part = slice(chunk.start, chunk.stop)
            super().__call__(index_q[part], index_weights[part], view, one, out[part], lens[part], flags, scratch)
            for row, token in enumerate(range(chunk.start, chunk.stop)):
                if not visible[token]:
                    continue
                picked = self.choose(scratch["scores"][row, : visible[token]], out.shape[1], batch)
                out[token] = -1
                out[token, : picked.numel()] = picked
                lens[token] = picked.numel()

    @staticmethod
    def _only(batch, chunk):
        return [chunk.stop - chunk.start if number == chunk.request else 0 for number in range(batch.num_requests)]

    def choose(self, scores, topk, batch):
        raise NotImplementedError


@broken(Stage.SELECT, "C2")
class TiesToTheHigherPosition(_Scoring):
    def choose(self, scores, topk, batch):
        return (scores.numel() - 1 - _pick(scores.flip(0).nan_to_num(nan=-torch.inf), topk)).sort().values


@broken(Stage.SELECT, "C1")
class TieOrderByCallSize(_Scoring):
    def choose(self, scores, topk, batch):
        scores = scores.nan_to_num(nan=-torch.inf)
        if batch.num_tokens % 2:
            return (scores.numel() - 1 - _pick(scores.flip(0), topk)).sort().values
        return _pick(scores, topk)


@broken(Stage.SELECT, "C2")
class NanIsTheGreatest(_Scoring):
    def choose(self, scores, topk, batch):
        return _pick(scores.nan_to_num(nan=torch.inf, posinf=torch.inf), topk)


@broken(Stage.SELECT, "C2")
class MinusInfinityIsASentinel(_Scoring):
    def choose(self, scores, topk, batch):
        picked = _pick(scores.nan_to_num(nan=-torch.inf), topk)
        return picked[scores[picked] > -torch.inf]


@broken(Stage.SELECT, "C2")
class BinsOverflow(_Scoring):
    """At most eight winners of each 64 keys: enough for scattered winners, not for clustered ones."""

    def choose(self, scores, topk, batch):
        full = torch.nn.functional.pad(scores.nan_to_num(nan=-torch.inf), (0, -scores.numel() % 64), value=-torch.inf)
        tiles = full.view(-1, 64)
        kept = tiles >= tiles.topk(8, dim=1).values[:, -1:]
        kept &= kept.cumsum(1) <= 8
        few = scores.numel() <= topk
        return _pick(scores if few else torch.where(kept.view(-1)[: scores.numel()], scores, -torch.inf), topk)


@broken(Stage.SELECT, "C2")
class CloseScoresInOneBin(_Scoring):
    """Compares the leading 22 bits alone."""

    def choose(self, scores, topk, batch):
        return _pick((scores.nan_to_num(nan=-torch.inf).view(torch.int32) >> 10 << 10).view(torch.float32), topk)


@broken(Stage.SELECT, "C2")
class LastKeysOnly(_Scoring):
    def choose(self, scores, topk, batch):
        return torch.arange(max(scores.numel() - topk, 0), scores.numel())


@broken(Stage.SELECT, "C2")
class ByScoreNotByPosition(_Scoring):
    def choose(self, scores, topk, batch):
        return torch.sort(scores.nan_to_num(nan=-torch.inf), descending=True, stable=True).indices[:topk]


@broken(Stage.SELECT, "C2")
class SeesOneTooMany(_Asking):
    def twist(self, view, batch):
        longest = torch.tensor(batch.seq_lens, dtype=torch.int32)[batch.req_id_per_token.clamp(min=0).long()]
        return view, replace(batch, visible_lens=torch.minimum(batch.visible_lens + 1, longest))


@broken(Stage.SELECT, "C2")
class SeesOneTooFew(_Asking):
    def twist(self, view, batch):
        return view, replace(batch, visible_lens=(batch.visible_lens - 1).clamp(min=0))


@broken(Stage.SELECT, "C2")
class TailNotFilled(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        for row, count in enumerate(lens.tolist()):
            out[row, count:] = 0x7F7F7F7F


@broken(Stage.SELECT, "C2")
class NoNanFlag(Select):
    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        super().__call__(index_q, index_weights, view, batch, out, lens, flags.clone(), scratch)


@broken(Stage.SELECT, "C3")
class FirstKeyForPadding(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        out[batch.req_id_per_token < 0, 0] = 0


@broken(Stage.SELECT, "C4")
class OnlyPowersOfTwoHeads(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        heads = self._dims.index_n_heads
        if heads & (heads - 1):
            out[:, 0] = torch.where(out[:, 0] >= 0, 0, -1)


@broken(Stage.SELECT, "C6")
class ThirtyTwoBitKeys(_Asking):
    def twist(self, view, batch):
        blocks = batch.block_table.long() * view.block_stride_bytes
        wrapped = torch.where(blocks >= 2**31, blocks % 2**31, blocks)
        return view, replace(batch, block_table=(wrapped // view.block_stride_bytes).to(torch.int32))


@broken(Stage.SELECT, "C1")
class GatherKeptForTheNextCall(Select):
    """Reuses the gathered keys when a call looks like the last one: same requests, same lengths, another table."""

    def __init__(self, problem, device):
        super().__init__(problem, device)
        self._last = None

    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        key = batch.query_lens[:1], [min(length, 64) for length in batch.seq_lens[:1]]
        if self._last is None or self._last[0] != key:
            self._last = key, batch.block_table.clone(), view
        table, kept = self._last[1], self._last[2]
        same = table.shape == batch.block_table.shape
        stale = replace(batch, block_table=table) if same else batch
        super().__call__(index_q, index_weights, kept if same else view, stale, out, lens, flags, scratch)


@broken(Stage.SELECT, "C7")
class TrustsItsScratch(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        if not bool((scratch["scores"][-1, -64:] == 0).all()):
            out[:1] = -1


@broken(Stage.SELECT, "C7")
class AllocatesTheWholeScoreMatrix(Select):
    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        torch.empty(batch.num_tokens, batch.max_seq_len, dtype=torch.float32)
        super().__call__(index_q, index_weights, view, batch, out, lens, flags, scratch)


@broken(Stage.SELECT, "C7")
class ReadsTheTableToTheHostsLength(Select):
    def __call__(self, index_q, index_weights, view, batch, out, lens, flags, scratch):
        super().__call__(index_q, index_weights, view, batch, out, lens, flags, scratch)
        for request, length in enumerate(batch.seq_lens):
            blocks = batch.block_table[request, : -(-length // view.block_size)].long()
            view.field("values").view(torch.uint8)[blocks].sum()


@broken(Stage.SELECT, "C7")
class WritesBehindItsBuffers(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        arena = torch.empty(0, dtype=torch.uint8).set_(scratch["keys"].untyped_storage())
        arena[-600:-500] = 0


@broken(Stage.SELECT, "C9")
class AnotherTopk(_Selecting):
    def spoil(self, view, batch, out, lens, scratch):
        half = max(out.shape[1] // 2, 1)
        out[:, half:] = -1
        lens.clamp_(max=half)


class _Attending(Attend):
    def __call__(self, q, view, indices, batch, softmax_scale, out, lse, scratch):
        super().__call__(*self.twist(q, view, indices, batch, softmax_scale), out, lse, scratch)
        self.spoil(batch, indices, out, lse)

    def twist(self, q, view, indices, batch, softmax_scale):
        return q, view, indices, batch, softmax_scale

    def spoil(self, batch, indices, out, lse):
        pass


@broken(Stage.ATTEND, "C1")
class OrderByCallSize(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        return q, view, indices.flip(1) if batch.num_tokens % 2 else indices, batch, softmax_scale


@broken(Stage.ATTEND, "C3")
class SlotZeroForMinusOne(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        return q, view, indices.clamp(min=0), batch, softmax_scale


@broken(Stage.ATTEND, "C3")
class DuplicatesCountOnce(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        ordered = indices.sort(1).values
        again = torch.nn.functional.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
        return q, view, torch.where(again, -1, ordered), batch, softmax_scale


@broken(Stage.ATTEND, "C3")
class NanForRowsWithoutKeys(_Attending):
    def spoil(self, batch, indices, out, lse):
        out[(indices < 0).all(1)] = torch.nan


@broken(Stage.ATTEND, "C11")
class LseToTheBaseTwo(_Attending):
    def spoil(self, batch, indices, out, lse):
        if lse is not None:
            lse *= 1.4426950408889634


@broken(Stage.ATTEND, "C11")
class ScaleAppliedTwice(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        return q, view, indices, batch, softmax_scale * softmax_scale


@broken(Stage.ATTEND, "C11")
class WithoutRope(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        plain = q.clone()
        plain[..., self._rank :] = 0
        return plain, view, indices, batch, softmax_scale


@broken(Stage.ATTEND, "C11")
class OneKeyLost(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        fewer = indices.clone()
        fewer[:, -1] = -1
        return q, view, fewer, batch, softmax_scale


@broken(Stage.ATTEND, "C4")
class HeadsInPairs(_Attending):
    def spoil(self, batch, indices, out, lse):
        if out.shape[1] % 2 and out.shape[1] > 1:
            out[:, -1] = out[:, -2]


@broken(Stage.ATTEND, "C7")
class OnesForTokensThatSeeNothing(_Attending):
    def spoil(self, batch, indices, out, lse):
        out[batch.visible_lens == 0] = 1


@broken(Stage.ATTEND, "C6")
class ThirtyTwoBitLatents(_Attending):
    def twist(self, q, view, indices, batch, softmax_scale):
        blocks = batch.block_table.long() * view.block_stride_bytes
        wrapped = torch.where(blocks >= 2**31, blocks % 2**31, blocks)
        table = (wrapped // view.block_stride_bytes).to(torch.int32)
        return q, view, indices, replace(batch, block_table=table), softmax_scale


class _Writing(Write):
    def latent(self, kv_c, k_pe, view, slots):
        super().latent(*self.twist_latent(kv_c, k_pe), self.twist_view(view), self.twist_slots(slots, view))
        self.spoil(view, slots)

    def index(self, index_k, view, slots):
        super().index(index_k, self.twist_view(view), self.twist_slots(slots, view))
        self.spoil(view, slots)

    def twist_latent(self, kv_c, k_pe):
        return kv_c, k_pe

    def twist_view(self, view):
        return view

    def twist_slots(self, slots, view):
        return slots

    def spoil(self, view, slots):
        pass


@broken(Stage.WRITE, "C5")
class MinusOneIsTheLastSlot(_Writing):
    def twist_slots(self, slots, view):
        return torch.where(slots == -1, view.num_slots - 1, slots)


@broken(Stage.WRITE, "C5")
class OneFp8MaximumForAll(_Writing):
    """448 whatever the encoding is."""

    def twist_view(self, view):
        if view.format.rule is None:
            return view
        rule = replace(view.format.rule, fp8_max=FP8_MAX["fp8"], amax_floor=view.format.rule.amax_floor)
        return replace(view, format=replace(view.format, rule=rule))


@broken(Stage.WRITE, "C5")
class ScaleRuleByHabit(_Writing):
    """Always a power of two."""

    def twist_view(self, view):
        if view.format.rule is None:
            return view
        return replace(view, format=replace(view.format, rule=replace(view.format.rule, power_of_two=True)))


@broken(Stage.WRITE, "C5")
class RowByRowInPlanarBlocks(_Writing):
    def twist_view(self, view):
        return replace(view, format=replace(view.format, planar=False))


@broken(Stage.WRITE, "C5")
class RopeSharesTheScale(_Writing):
    """Clamps the rope part to what the latent part needs."""

    def twist_latent(self, kv_c, k_pe):
        most = kv_c.abs().amax(-1, keepdim=True)
        return kv_c, torch.minimum(torch.maximum(k_pe, -most), most)


@broken(Stage.WRITE, "C5")
class ClearsTheGap(_Writing):
    def spoil(self, view, slots):
        used = view.block_size * view.format.row_bytes
        if view.block_stride_bytes > used and slots.numel():
            bytes_ = torch.empty(0, dtype=torch.uint8).set_(view.storage.untyped_storage())
            bytes_[view.offset_bytes + used : view.offset_bytes + used + 4] = 0


@broken(Stage.WRITE, "C6")
class ThirtyTwoBitSlots(_Writing):
    def twist_slots(self, slots, view):
        blocks = slots // view.block_size * view.block_stride_bytes
        wrapped = torch.where(blocks >= 2**31, blocks % 2**31, blocks) // view.block_stride_bytes
        return torch.where(slots >= 0, wrapped * view.block_size + slots % view.block_size, slots)


@broken(Stage.WRITE, "C7")
class CopiesTheWholeCall(_Writing):
    def spoil(self, view, slots):
        torch.empty(slots.numel(), 4096)


@broken(Stage.WRITE, "C8")
class SaysFast(_Writing):
    pass


BROKEN["SaysFast"] = (replace(BROKEN["SaysFast"][0], mode=lambda problem, device: "fast"), "C8")
