"""The comparison of a worker's bound kernels with the reference before the first request: a few rows, under 5 s."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...batch import BatchLayout
from ...quantize import quantize_index_q
from ...reference import write as reference_write
from ...testing.compare import Difference, check_attention, check_same, check_selection
from ...testing.inputs import Prompt, cache_of, scattered_blocks, slots_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...attention import SparseMLA
    from ...cache import CacheFormat, CacheView

_SEED = 1
_ROWS = 3
_PAST_TOPK = 100


def differences(attention: SparseMLA) -> list[Difference]:
    """What differs from the reference, for one request a little longer than ``index_topk``; empty when all is well."""
    return _Request(attention).differences()


class _Request:
    """One request in caches full of junk: all rows written, the first and the last few selected and attended.

    The first rows see fewer than ``index_topk`` keys, so a wrong causal limit shows; the last have to choose.
    """

    def __init__(self, attention: SparseMLA) -> None:
        problem = attention.plan.problem
        self._attention, self._problem = attention, problem
        self._length = min(problem.max_model_len, problem.dims.index_topk + _PAST_TOPK)
        rows = min(_ROWS, self._length, problem.max_num_tokens)
        self._spans = sorted({(0, rows), (self._length - rows, self._length)})
        self._prompt = Prompt(dims=problem.dims, length=self._length, seed=_SEED, dtype=problem.dtype)
        table, blocks = scattered_blocks([self._length], problem.latent_block_size, seed=_SEED)
        self._slots = slots_for(table[0], problem.latent_block_size, 0, self._length)
        self._table = table.to(attention.device)
        self._latent = self._cache(problem.latent, blocks)
        self._index = self._cache(problem.index, blocks)

    def _cache(self, cache_format: CacheFormat, blocks: int) -> CacheView:
        view = cache_of(cache_format, self._problem.latent_block_size, blocks, seed=_SEED)
        return replace(view, storage=view.storage.to(self._attention.device))

    def _given(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._prompt.rows(name, start, stop).to(self._attention.device)

    def differences(self) -> list[Difference]:
        self._write()
        found = [difference for span in self._spans for difference in self._check(*span)]
        return [difference for difference in found if difference is not None]

    def _check(self, start: int, stop: int) -> Iterator[Difference | None]:
        indices, out = self._run(start, stop)
        for row in range(start, stop):
            yield self._check_bytes(row)
            yield self._check_row(row, indices[row - start], out[row - start])
        if self._strict:
            alone = [self._run(row, row + 1) for row in range(start, stop)]
            yield check_same("indices of one row alone", [indices, torch.cat([one for one, _ in alone])])
            yield check_same("output of one row alone", [out, torch.cat([one for _, one in alone])])

    @property
    def _strict(self) -> bool:
        plan = self._attention.plan
        return plan.select.mode == plan.attend.mode == "strict"

    def _write(self) -> None:
        slots = self._slots.to(self._attention.device)
        step = self._problem.max_num_tokens
        for start in range(0, self._length, step):
            stop = min(start + step, self._length)
            latents = (self._given("kv_c", start, stop), self._given("k_pe", start, stop))
            self._attention.write_latent(*latents, self._latent, slots[start:stop])
            self._attention.write_index(self._given("index_k", start, stop), self._index, slots[start:stop])

    def _queries(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        index_q, weights = self._given("index_q", start, stop), self._given("index_weights", start, stop)
        if self._problem.index.rule is None:
            return index_q, weights
        index_q, scale = quantize_index_q(index_q, self._problem.index.encoding)
        return index_q, weights * scale

    def _run(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = BatchLayout.build(query_lens=[stop - start], seq_lens=[stop], block_table=self._table)
        indices = self._attention.select(*self._queries(start, stop), self._index, batch)
        queries, scale = self._given("q", start, stop), self._problem.dims.softmax_scale
        return indices, self._attention.attend(queries, self._latent, indices, batch, scale).out

    def _check_bytes(self, row: int) -> Difference | None:
        latent = torch.cat((self._prompt.rows("kv_c", row, row + 1), self._prompt.rows("k_pe", row, row + 1)), -1)[0]
        for what, values, view in (
            ("latent cache", latent, self._latent),
            ("index cache", self._prompt.rows("index_k", row, row + 1)[0], self._index),
        ):
            wanted = reference_write.encode_row(values, view.format)
            storage = torch.empty(0, dtype=torch.uint8, device=view.storage.device).set_(view.storage.untyped_storage())
            for field in view.format.fields:
                start, count = reference_write.field_bytes(view, int(self._slots[row]), field)
                if bytes(storage[start : start + count].tolist()) != wanted[field.name]:
                    return Difference(what=what, row=row, detail=f"bytes of field {field.name}")
        return None

    def _check_row(self, row: int, indices: torch.Tensor, out: torch.Tensor) -> Difference | None:
        keys, k_scale = reference_write.decode_rows(self._index, self._slots[: row + 1].tolist())
        index_q, weights = (given.cpu()[0] for given in self._queries(row, row + 1))
        wrong = check_selection(row, indices, index_q, weights, keys, k_scale)
        if wrong is not None:
            return wrong
        chosen = self._slots[indices[indices >= 0].long().cpu()]
        latent, _ = reference_write.decode_rows(self._latent, chosen.tolist())
        query = self._prompt.rows("q", row, row + 1)[0]
        return check_attention(row, out, None, query, latent, self._problem.dims.softmax_scale)
