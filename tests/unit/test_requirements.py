from __future__ import annotations

from dataclasses import fields, replace

import pytest

from sparse_mla.device import Device
from sparse_mla.requirements import Reason, Requires, check
from sparse_mla.testing.geometries import FP8, PLAIN

SIZES = {"max_num_tokens": 8, "max_num_requests": 2, "max_model_len": 100}
PROBLEM, FP8_PROBLEM = PLAIN.problem(**SIZES), FP8.problem(**SIZES)
CPU, GPU = Device.named("cpu"), Device.named("gfx950")
NONE = frozenset()

# limit, a value that PROBLEM on CPU satisfies, one that it does not, what the reason must say
LIMITS = [
    ("archs", ("sm90", "cpu"), ("sm90", "rocm"), "device  needs sm90 or rocm, got cpu"),
    ("dtypes", ("bf16",), ("f16", "f32"), "dtype  needs f16 or f32, got bf16"),
    ("latent", ("fp8_ds_mla:fp8", "plain"), ("plain:f16",), "latent cache  needs plain:f16, got plain:bf16"),
    ("index", ("plain:bf16",), ("index_fp8",), "index cache  needs index_fp8, got plain:bf16"),
    ("kv_lora_ranks", (256, 512), (256,), "kv_lora_rank  needs 256, got 512"),
    ("rope_dims", (0, 64), (0,), "qk_rope_head_dim  needs 0, got 64"),
    ("index_head_dims", (64, 128), (32, 128), "index_head_dim  needs 32 or 128, got 64"),
    ("max_heads", 4, 3, "attention heads per rank  needs <= 3, got 4"),
    ("max_index_heads", 4, 3, "index_n_heads  needs <= 3, got 4"),
    ("max_index_topk", 24, 23, "index_topk  needs <= 23, got 24"),
    ("packages", (), ("triton",), "package  needs triton, got not installed. pip install triton"),
]


def test_no_limits_means_anything():
    assert check(Requires(), PROBLEM, CPU, NONE) == ()
    assert check(Requires(), FP8_PROBLEM, GPU, NONE) == ()


def test_every_limit_is_tested_here():
    assert {limit for limit, *_ in LIMITS} == {field.name for field in fields(Requires)}


@pytest.mark.parametrize(("limit", "inside", "outside", "said"), LIMITS, ids=[limit for limit, *_ in LIMITS])
def test_a_limit_gives_one_reason_with_both_values(limit, inside, outside, said):
    assert check(Requires(**{limit: inside}), PROBLEM, CPU, NONE) == ()
    assert [str(reason) for reason in check(Requires(**{limit: outside}), PROBLEM, CPU, NONE)] == [said]


def test_all_reasons_are_given_at_once():
    everything = Requires(**{limit: outside for limit, _, outside, _ in LIMITS})
    assert len(check(everything, PROBLEM, CPU, NONE)) == len(LIMITS)


def test_a_device_kind_stands_for_all_of_its_architectures():
    assert check(Requires(archs=("rocm",)), PROBLEM, GPU, NONE) == ()
    assert check(Requires(archs=("gfx942",)), PROBLEM, GPU, NONE)[0].got == "gfx950"


def test_a_limit_of_zero_is_a_limit():
    assert check(Requires(max_heads=0), PROBLEM, CPU, NONE)
    assert check(Requires(rope_dims=(0,)), replace(PROBLEM), CPU, NONE)


def test_installed_packages_count_one_by_one():
    needs = Requires(packages=("a", "b"))
    assert [reason.needs for reason in check(needs, PROBLEM, CPU, frozenset({"a"}))] == ["b"]
    assert check(needs, PROBLEM, CPU, frozenset({"a", "b", "c"})) == ()


def test_encodings_are_told_apart():
    assert check(Requires(latent=("fp8_ds_mla:fp8",)), FP8_PROBLEM, CPU, NONE) == ()
    assert check(Requires(latent=("fp8_ds_mla:fp8fnuz",)), FP8_PROBLEM, CPU, NONE)[0].got == "fp8_ds_mla:fp8"


def test_a_reason_reads_as_one_line():
    assert str(Reason(what="a", needs="b", got="c")) == "a  needs b, got c"
    assert str(Reason(what="a", needs="b", got="c", hint="d")) == "a  needs b, got c. d"
