"""On a GPU: both score kernels give the same bits, whatever the values; what strict mode rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from disagreeing import Reordered, Silent, agree

from sparse_mla.backends.triton.select import Select
from sparse_mla.cache import plain
from sparse_mla.device import probe
from sparse_mla.testing.geometries import GLM_TP4

KEYS = {"fp8": GLM_TP4.index, "bf16": plain(128, "bf16"), "f32": plain(128, "f32")}


def agreed(kind, heads, index, spread):
    geometry = replace(GLM_TP4, dims=replace(GLM_TP4.dims, index_n_heads=heads), index=KEYS[index])
    problem = geometry.problem(max_num_tokens=256, max_num_requests=128, max_model_len=65536)
    return agree(kind, problem, probe("cuda"), torch.device("cuda"), spread)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 12.0])
@pytest.mark.parametrize("heads", [24, 64])
@pytest.mark.parametrize("index", KEYS)
def test_the_score_kernels_agree(index, heads, spread):
    assert agreed(Select, heads, index, spread)
    assert not agreed(Reordered, heads, index, spread)
    assert not agreed(Silent, heads, index, spread)
