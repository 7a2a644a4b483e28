"""Hashes are over the bytes that they claim, whatever the cut, and a difference has a position."""

from __future__ import annotations

import hashlib

import torch

from sparse_mla.backends.eager.write import Write
from sparse_mla.cache import index_fp8
from sparse_mla.device import Device
from sparse_mla.testing.geometries import FP8
from sparse_mla.testing.inputs import cache_of, scattered_blocks, slots_for
from sparse_mla.verify.trace import Trace, trace_cache

ROWS = torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
LSE = torch.arange(50.0)


def fed(*cuts):
    trace = Trace(keep=frozenset({7}))
    for start, stop in zip((0, *cuts), (*cuts, 50), strict=True):
        trace.add(range(start, stop), ROWS[start:stop], LSE[start:stop, None])
    return trace


def test_the_hash_is_that_of_the_bytes_and_not_of_the_cut():
    records = [
        ROWS[row].flatten().view(torch.uint8).numpy().tobytes() + LSE[row, None].view(torch.uint8).numpy().tobytes()
        for row in range(50)
    ]
    assert fed().sha256 == fed(3, 4, 20).sha256 == hashlib.sha256(b"".join(records)).hexdigest()
    assert fed(9).digest(7) == hashlib.sha256(records[7]).digest()
    assert torch.equal(fed(9).kept[7][0], ROWS[7])
    assert fed().kept.keys() == {7}


def test_a_difference_has_the_lowest_position():
    other = Trace()
    changed = ROWS.clone()
    changed[11:13] += 1
    other.add(range(50), changed, LSE[:, None])
    assert fed().first_difference(other) == 11
    assert fed().first_difference(fed(25)) is None


def test_cache_bytes_are_hashed_in_logical_order_wherever_their_blocks_lie():
    geometry, total, size = FP8, 300, 16
    kind = index_fp8(geometry.dims.index_head_dim)
    keys = torch.randn(total, geometry.dims.index_head_dim, generator=torch.Generator().manual_seed(1))
    problem = geometry.problem(max_num_tokens=total, max_num_requests=1, max_model_len=total)
    hashes, traces = set(), []
    for seed in range(3):
        table, num_blocks = scattered_blocks([total], size, seed=seed)
        view = cache_of(kind, size, num_blocks, seed=seed)
        Write(problem, Device.named("cpu")).index(keys, view, slots_for(table[0], size, 0, total))
        traces.append(trace_cache(view, table[0], total))
        hashes.add(traces[-1].sha256)
    assert len(hashes) == 1
    view.field("scale")[int(table[0, 3]), 5, 0] += 1
    assert trace_cache(view, table[0], total).first_difference(traces[0]) == 0
