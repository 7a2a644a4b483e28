"""After warm-up nothing is left to compile: every launch of random legal calls has a key that warm-up has asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from keys import described, keys_of

from sparse_mla.attention import SparseMLA
from sparse_mla.backends.table import TABLE
from sparse_mla.backends.triton import launch
from sparse_mla.batch import BatchLayout
from sparse_mla.cache import CacheView, index_fp8, plain
from sparse_mla.device import Device
from sparse_mla.plan import make_plan
from sparse_mla.shapes import DTYPE_NAMES
from sparse_mla.testing.geometries import GLM_TP4, plain_caches, sizes
from sparse_mla.workspace import Workspace

ROWS = tuple(row for row in TABLE if row.name == "triton")
FEW = plain_caches("few", sizes(3, 5, 24, rope=0), "f16", block_size=1)
GEOMETRIES = {
    "glm-5.1 on 4 ranks": GLM_TP4,
    "64 heads, blocks of one token": replace(
        GLM_TP4, dims=replace(GLM_TP4.dims, num_heads=64, index_n_heads=64), block_size=1
    ),
    "bf16 keys": replace(GLM_TP4, index=plain(128, "bf16")),
    "few heads": FEW,
    "few heads, fnuz keys": replace(FEW, index=index_fp8(64, encoding="fp8fnuz"), block_size=16),
}


def operator(geometry, device, *, deterministic):
    problem = geometry.problem(
        max_num_tokens=512, max_num_requests=64, max_model_len=20_000, deterministic=deterministic
    )
    plan = make_plan(problem, device, rows=ROWS, assume_installed=True, backend="triton")
    return SparseMLA(plan, Workspace())


def rows_within(rng, shape, dtype):
    """Rows as an engine hands them on: a slice of a longer buffer."""
    before, after = rng.choice((0, 1, 3)), rng.randint(0, 2)
    whole = torch.zeros(before + shape[0] + after, *shape[1:], dtype=dtype)
    return whole[before : before + shape[0]]


def cache(rng, cache_format, block_size, blocks):
    """A cache of an engine: behind other blocks of the same allocation."""
    before = rng.randint(0, 3) * 4
    block = block_size * cache_format.row_bytes
    return CacheView(
        storage=torch.zeros((before + blocks) * block, dtype=torch.uint8),
        format=cache_format,
        block_size=block_size,
        block_stride_bytes=block,
        num_blocks=blocks,
        offset_bytes=before * block,
    )


def random_batch(rng, block_size):
    requests = rng.randint(0, 9)
    queries = [rng.choice((0, 1, 1, 1, 2, 15, 16, 17, 40, 90)) for _ in range(requests)]
    seqs = [min(20_000, query + rng.choice((0, 1, 16, 300, 4096, 19_000))) for query in queries]
    width = max(-(-max(seqs, default=1) // block_size), 1) + rng.randint(0, 3)
    return BatchLayout(
        req_id_per_token=rows_within(rng, (sum(queries),), torch.int32),
        visible_lens=rows_within(rng, (sum(queries),), torch.int32),
        block_table=rows_within(rng, (requests, width), torch.int32),
        query_lens=tuple(queries),
        seq_lens=tuple(seqs),
    )


def call(rng, lane, geometry):
    """Write, select and attend as a step would."""
    dims, dtype = geometry.dims, getattr(torch, DTYPE_NAMES[geometry.dtype])
    batch = random_batch(rng, geometry.block_size)
    tokens, blocks = batch.num_tokens, rng.choice((1, 2, 17, 33))
    latent, index = (cache(rng, one, geometry.block_size, blocks) for one in (geometry.latent, geometry.index))
    slots = rows_within(rng, (rng.randint(0, tokens),), torch.int64)
    # Latents and rotated keys are halves of one projection, and sometimes tensors of their own.
    projected = rows_within(rng, (tokens, dims.head_dim), dtype)
    kv_c, k_pe = projected[:, : dims.kv_lora_rank], projected[:, dims.kv_lora_rank :]
    if rng.random() < 0.5:
        kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
    lane.write_latent(kv_c, k_pe, latent, slots)
    lane.write_index(rows_within(rng, (tokens, dims.index_head_dim), dtype), index, slots)
    asked = rng.choice((geometry.index.encoding, geometry.dtype))
    index_q = rows_within(rng, (tokens, dims.index_n_heads, dims.index_head_dim), getattr(torch, DTYPE_NAMES[asked]))
    indices = rows_within(rng, (tokens, dims.index_topk), torch.int32)
    lens = rows_within(rng, (tokens,), torch.int32)
    weights = rows_within(rng, (tokens, dims.index_n_heads), torch.float32)
    lane.select(index_q, weights, index, batch, indices, lens)
    q = rows_within(rng, (tokens, dims.num_heads, dims.head_dim), dtype)
    out = rows_within(rng, (tokens, dims.num_heads, dims.kv_lora_rank), dtype) if rng.random() < 0.5 else None
    lane.attend(q, latent, indices, batch, rng.choice((1, 0.0625)), out, return_lse=rng.random() < 0.5)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_no_call_asks_for_a_kernel_that_warm_up_did_not(name, arch, deterministic):
    device, geometry = Device.named(arch), GEOMETRIES[name]
    lane = operator(geometry, device, deterministic=deterministic)
    warm = keys_of(lane.warm_up, device)
    rng = random.Random(f"{name} {arch} {deterministic}")
    asked = set()
    for _ in range(12):
        asked |= keys_of(lambda: call(rng, lane, geometry), device)
    assert len(asked) > 5
    assert asked <= warm, described(asked - warm, warm)


def test_an_allocation_of_4_gib_asks_for_no_other_kernel(monkeypatch):
    """On AMD Triton looks at the size of a tensor's allocation; the kernels are started so that it does not."""
    device = Device.named("gfx942")
    lane = operator(GLM_TP4, device, deterministic=False)
    warm = keys_of(lane.warm_up, device)
    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "size", lambda _: 4 << 30)
        assert keys_of(lambda: call(random.Random(1), lane, GLM_TP4), device) <= warm
        patched.setattr(launch, "arguments", lambda args, _: args)
        large = keys_of(lane.warm_up, device)
    monkeypatch.setattr(launch, "arguments", lambda args, _: args)
    assert large == warm
    assert not keys_of(lane.warm_up, device) & warm  # what a small allocation would have asked for


def test_keys_tell_what_triton_tells_apart():
    """The control: a pointer off the 16-byte grid where kernels count on it is another key."""
    device, lane = Device.named("sm90"), operator(GLM_TP4, Device.named("sm90"), deterministic=True)
    warm = keys_of(lane.warm_up, device)
    batch = BatchLayout.build(query_lens=[3, 20], seq_lens=[90, 20], block_table=torch.zeros(2, 2, dtype=torch.int32))
    wide = torch.zeros(batch.num_tokens * 16 * 576 + 1, dtype=torch.bfloat16)
    latent = cache(random.Random(3), GLM_TP4.latent, 64, 2)
    indices = torch.zeros(batch.num_tokens, 2048, dtype=torch.int32)
    for shift, known in ((0, True), (1, False)):
        q = wide[shift : wide.numel() - 1 + shift].view(batch.num_tokens, 16, 576)
        asked = keys_of(lambda: lane.attend(q, latent, indices, batch, 1.0), device)  # noqa: B023
        assert (asked <= warm) is known, described(asked - warm, warm)
