"""After warm-up nothing is left to compile: every launch of random legal calls has a key that warm-up has asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from keys import described, keys_of
from steps import Steps

from sparse_mla.attention import SparseMLA
from sparse_mla.backends.table import TABLE
from sparse_mla.backends.triton import launch
from sparse_mla.batch import BatchLayout
from sparse_mla.cache import index_fp8, plain
from sparse_mla.device import Device
from sparse_mla.plan import make_plan
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


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx942", "gfx1100"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_no_call_asks_for_a_kernel_that_warm_up_did_not(name, arch, deterministic):
    device, geometry = Device.named(arch), GEOMETRIES[name]
    lane = operator(geometry, device, deterministic=deterministic)
    warm = keys_of(lane.warm_up, device)
    steps = Steps(lane, geometry, random.Random(f"{name} {arch} {deterministic}"))
    asked = set().union(*(keys_of(steps.step, device) for _ in range(12)))
    assert len(asked) > 5
    assert asked <= warm, described(asked - warm, warm)


def test_an_allocation_of_4_gib_asks_for_no_other_kernel(monkeypatch):
    """On AMD Triton looks at the size of a tensor's allocation; the kernels are started so that it does not."""
    device = Device.named("gfx942")
    lane = operator(GLM_TP4, device, deterministic=False)
    warm = keys_of(lane.warm_up, device)
    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "size", lambda _: 4 << 30)
        assert keys_of(Steps(lane, GLM_TP4, random.Random(1)).step, device) <= warm
        patched.setattr(launch, "arguments", lambda args, _: args)
        large = keys_of(lane.warm_up, device)
    monkeypatch.setattr(launch, "arguments", lambda args, _: args)
    assert large == warm
    assert not keys_of(lane.warm_up, device) & warm  # what a small allocation would have asked for


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_warm_up_does_not_follow_the_default_dtype(arch):
    """vLLM sets it to the model's while it builds the model, and that is when warm-up runs."""
    device = Device.named(arch)
    wanted = keys_of(operator(GLM_TP4, device, deterministic=True).warm_up, device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = keys_of(operator(GLM_TP4, device, deterministic=True).warm_up, device)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == wanted, described(wanted - found, found)


def test_keys_tell_what_triton_tells_apart():
    """The control: a pointer off the 16-byte grid where kernels count on it is another key."""
    device, lane = Device.named("sm90"), operator(GLM_TP4, Device.named("sm90"), deterministic=True)
    warm = keys_of(lane.warm_up, device)
    batch = BatchLayout.build(query_lens=[3, 20], seq_lens=[90, 20], block_table=torch.zeros(2, 2, dtype=torch.int32))
    wide = torch.zeros(batch.num_tokens * 16 * 576 + 1, dtype=torch.bfloat16)
    latent = Steps(lane, GLM_TP4, random.Random(3)).cache(GLM_TP4.latent, 2)
    indices = torch.zeros(batch.num_tokens, 2048, dtype=torch.int32)
    for shift, known in ((0, True), (1, False)):
        q = wide[shift : wide.numel() - 1 + shift].view(batch.num_tokens, 16, 576)
        asked = keys_of(lambda: lane.attend(q, latent, indices, batch, 1.0), device)  # noqa: B023
        assert (asked <= warm) is known, described(asked - warm, warm)
