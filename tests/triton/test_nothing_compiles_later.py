"""On a GPU: after warm-up no call compiles anything, counted where Triton compiles. Needs a device; see tests/compile for the
same claim by the keys alone."""

from __future__ import annotations

import random

import pytest
import torch
from steps import Steps
from triton import knobs
from triton.runtime.jit import JITFunction

from sparse_mla.backends.triton import attend, pick, scores, write
from sparse_mla.testing.candidates import from_table
from sparse_mla.testing.geometries import GLM_TP4, plain_caches, sizes

FEW = plain_caches("few", sizes(3, 5, 24, rope=0), "f16", block_size=1)


@pytest.fixture
def compiled(monkeypatch):
    """Names of kernels, one each time that Triton meets a new key; of earlier tests it remembers none."""
    for module in (attend, pick, scores, write):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
    names = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: names.append(fn.name) and None)
    return names


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("geometry", [GLM_TP4, FEW], ids=str)
def test_no_step_compiles(compiled, geometry, deterministic):
    problem = geometry.problem(
        max_num_tokens=512, max_num_requests=64, max_model_len=20_000, deterministic=deterministic
    )
    lane = from_table("triton", "cuda").operator(problem)
    assert compiled, "warm-up compiled nothing: the hook is not called"
    del compiled[:]
    steps = Steps(lane, geometry, random.Random(5), "cuda")
    for _ in range(60):
        steps.step()
    torch.cuda.synchronize()
    assert compiled == []
