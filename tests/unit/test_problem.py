from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_mla.cache import fp8_ds_mla, index_fp8, plain
from sparse_mla.errors import UsageError
from sparse_mla.problem import Stage
from sparse_mla.testing.geometries import PLAIN

GOOD = PLAIN.problem(max_num_tokens=8, max_num_requests=2, max_model_len=100)


def test_stages_are_their_names():
    assert [str(stage) for stage in Stage] == ["write", "select", "attend"]
    assert Stage("select") is Stage.SELECT


@pytest.mark.parametrize(
    "name", ["latent_block_size", "index_block_size", "max_num_tokens", "max_num_requests", "max_model_len"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31, 2**63])
def test_sizes_outside_32_bits_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}: needs a whole number from 1 to 2147483647, got {value}"):
        replace(GOOD, **{name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"latent": plain(512, "bf16")}, r"latent cache plain\[512 bf16\]: needs rows of 576 values, got 512"),
        ({"latent": fp8_ds_mla(512, 0)}, r"latent cache fp8_ds_mla\[512 fp8\]: needs rows of 576"),
        ({"index": index_fp8(128)}, r"index cache index_fp8\[128 fp8\]: needs rows of 64 values, got 128"),
    ],
)
def test_a_cache_of_another_width_is_refused(change, said):
    with pytest.raises(UsageError, match=said):
        replace(GOOD, **change)


def test_problems_are_values():
    assert replace(GOOD) == GOOD
    assert hash(replace(GOOD)) == hash(GOOD)
    assert replace(GOOD, deterministic=False) != GOOD
