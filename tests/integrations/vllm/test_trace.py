"""Traces name each row by (request, layer, stage, position), however the prompt was cut."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sparse_mla.cache import CacheView, fp8_ds_mla, index_fp8
from sparse_mla.integrations.vllm import trace
from sparse_mla.integrations.vllm.layer_seams import Step
from sparse_mla.testing.inputs import cache_of


def step(*requests: tuple[int, int, int]) -> Step:
    """Requests as (first block, query tokens, tokens in the cache)."""
    blocks, query_lens, seq_lens = zip(*requests, strict=True)
    table = torch.tensor(blocks, dtype=torch.int32)[:, None]
    empty = torch.empty(0)
    return Step(sum(query_lens), list(query_lens), list(seq_lens), empty, empty, table, empty)


def test_requests_are_numbered_by_first_appearance():
    numbers = trace.RequestNumbers()
    assert numbers.of(step((7, 4, 4))) == (0,)
    assert numbers.of(step((7, 4, 8), (3, 2, 2))) == (0, 1)
    assert numbers.of(step((3, 1, 3), (7, 1, 9))) == (1, 0)
    assert numbers.of(step((7, 5, 5))) == (2,)  # the block was freed and starts another request
    assert numbers.of(step((9, 0, 0))) == (-1,)


def metadata(request: int, start: int, stop: int) -> SimpleNamespace:
    batch = SimpleNamespace(query_lens=(stop - start,), seq_lens=(stop,))
    return SimpleNamespace(trace_requests=(request,), batch=batch, slot_mapping=torch.arange(start, stop))


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 1, 2, 8, 9)])
def test_rows_do_not_depend_on_the_cut(cuts, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_TRACE", str(tmp_path / "trace"))
    output = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()
    view = cache_of(index_fp8(128), 4, 3, seed=0, gap_bytes=64)
    for start, stop in pairwise(cuts):
        trace.record(metadata(5, start, stop), "layer.0", output=output[start:stop], index_cache=view)
    rows = trace.load(tmp_path / "trace")
    wanted = [hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest() for row in output]
    assert rows[5, "layer.0", "output"] == dict(enumerate(wanted))
    assert rows[5, "layer.0", "index_cache"] == {slot: _index_digest(view, slot) for slot in range(9)}


def _index_digest(view: CacheView, slot: int) -> str:
    """By hand from the layout: a block holds 4 rows of 128 values, then 4 scales."""
    block, row = divmod(slot, 4)
    start = block * view.block_stride_bytes
    raw = view.storage.numpy().tobytes()[start : start + 4 * 132]
    return hashlib.sha256(raw[row * 128 : row * 128 + 128] + raw[512 + row * 4 : 516 + row * 4]).hexdigest()


def test_one_changed_byte_changes_its_row_alone(tmp_path, monkeypatch):
    view = cache_of(fp8_ds_mla(), 16, 1, seed=1)
    loaded = []
    for name in ("before", "after"):
        monkeypatch.setenv("SPARSE_MLA_TRACE", str(tmp_path / name))
        trace.record(metadata(0, 0, 16), "layer.0", latent_cache=view)
        loaded.append(trace.load(tmp_path / name)[0, "layer.0", "latent_cache"])
        view.storage[3 * 656 + 600] ^= 1
    before, after = loaded
    assert [row for row in before if before[row] != after[row]] == [3]
