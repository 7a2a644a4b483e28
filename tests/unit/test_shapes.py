from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.errors import ShapeError
from sparse_mla.shapes import DTYPE_NAMES, bind, dtype_name


@dataclass
class Shaped:
    """Anything with a shape and a dtype can be bound."""

    shape: tuple[int, ...]
    dtype: str = "torch.bfloat16"


@pytest.mark.parametrize(("short", "long"), DTYPE_NAMES.items())
def test_short_names_are_torchs_dtypes(short, long):
    assert dtype_name(getattr(torch, long)) == short


def test_an_unknown_dtype_keeps_its_name():
    assert dtype_name(torch.complex64) == "complex64"


def test_letters_are_bound_and_must_agree():
    sizes = {"K": 7}
    bind(sizes, a=(Shaped((3, 7)), "[T, K] bf16"), b=(Shaped((3,)), "[T] bf16|f32"))
    assert sizes == {"K": 7, "T": 3}
    with pytest.raises(ShapeError, match=r"c has the wrong shape: needs \[T, 2\] any with T = 3, got \[4, 2\] bf16"):
        bind(sizes, c=(Shaped((4, 2)), "[T, 2] any"))


def test_a_sum_binds_its_one_unknown_letter_or_is_checked():
    sizes = {"D_c": 512}
    bind(sizes, q=(Shaped((576,)), "[D_c + D_r] any"))
    assert sizes["D_r"] == 64
    bind(sizes, q=(Shaped((576,)), "[D_c+D_r] any"))
    with pytest.raises(ShapeError, match="D_c = 512, D_r = 64"):
        bind(sizes, q=(Shaped((575,)), "[D_c + D_r] any"))


def test_a_sum_never_binds_a_negative_size():
    with pytest.raises(ShapeError, match="wrong shape"):
        bind({"D_c": 512}, q=(Shaped((500,)), "[D_c + D_r] any"))


def test_two_unknown_letters_in_a_sum_cannot_be_bound():
    with pytest.raises(ShapeError):
        bind({}, q=(Shaped((5,)), "[A + B] any"))


@pytest.mark.parametrize(
    ("shape", "dtype", "spec", "what"),
    [
        ((3,), "torch.bfloat16", "[T, H] bf16", "wrong rank"),
        ((), "torch.bfloat16", "[T] bf16", "wrong rank"),
        ((3, 4, 5), "torch.bfloat16", "[T, H] bf16", "wrong rank"),
        ((3, 4), "torch.float64", "[T, H] bf16|f32", "wrong dtype"),
        ((3, 5), "torch.bfloat16", "[T, 4] bf16", "wrong shape"),
    ],
)
def test_the_message_names_tensor_spec_and_what_came(shape, dtype, spec, what):
    with pytest.raises(ShapeError) as caught:
        bind({}, kv_c=(Shaped(shape, dtype), spec))
    said = str(caught.value)
    assert f"kv_c has the {what}" in said
    assert spec in said
    assert f"[{', '.join(map(str, shape))}]" in said


def test_an_empty_size_list_is_a_scalar():
    bind({}, x=(Shaped(()), "[] any"))


@pytest.mark.parametrize("spec", ["", "T bf16", "[T bf16", "[T]", "[T] bf16 f32"])
def test_a_spec_that_is_no_spec_is_a_programming_error(spec):
    with pytest.raises(ValueError, match="not of the form"):
        bind({}, x=(Shaped((1,)), spec))


@given(st.lists(st.integers(0, 9), max_size=5), st.lists(st.integers(0, 9), max_size=5))
def test_fixed_sizes_accept_exactly_themselves(wanted, got):
    spec = f"[{', '.join(map(str, wanted))}] any"
    if wanted == got:
        bind({}, x=(Shaped(tuple(got)), spec))
    else:
        with pytest.raises(ShapeError):
            bind({}, x=(Shaped(tuple(got)), spec))
