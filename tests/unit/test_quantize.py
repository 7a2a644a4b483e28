from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.cache import FP8_MAX, Field, WriteRule, fp8_ds_mla, index_fp8
from sparse_mla.quantize import decode_fp8, quantize, quantize_index_q
from sparse_mla.reference.write import encode_row, fp8_values
from sparse_mla.shapes import DTYPE_NAMES

ENCODINGS = pytest.mark.parametrize("encoding", ["fp8", "fp8fnuz"])
LARGEST = {"fp8": 448.0, "fp8fnuz": 240.0}


def decoded(codes, encoding):
    out = torch.full(codes.shape, 77.0)
    decode_fp8(codes, Field(name="values", dtype=encoding, count=codes.shape[-1]), out)
    return out


@ENCODINGS
@pytest.mark.parametrize("width", [1, 3, 128])
def test_every_byte_decodes_to_its_value(encoding, width):
    codes = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(9, width)
    wanted = torch.tensor(fp8_values(encoding)).repeat(9).unsqueeze(1).expand(-1, width)
    torch.testing.assert_close(decoded(codes, encoding), wanted, rtol=0, atol=0, equal_nan=True)


@ENCODINGS
def test_one_nan_among_many_rows_is_found(encoding):
    codes = torch.full((1500, 4), 0x21, dtype=torch.uint8)
    codes[1111, 2] = 0x80 if encoding == "fp8fnuz" else 0xFF
    out = decoded(codes, encoding)
    assert out.isnan().nonzero().tolist() == [[1111, 2]]


@ENCODINGS
def test_decoding_writes_into_strided_rows_and_nowhere_else(encoding):
    wide = torch.full((300, 7), -5.0)
    codes = torch.randint(0, 127, (300, 3), dtype=torch.uint8)
    decode_fp8(codes, Field(name="values", dtype=encoding, count=3), wide[:, 2:5])
    assert torch.equal(wide[:, 2:5], decoded(codes, encoding))
    assert (wide[:, :2] == -5).all()
    assert (wide[:, 5:] == -5).all()


@ENCODINGS
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_and_scale_equal_the_references(encoding, power_of_two, dtype):
    formats = [
        index_fp8(128, encoding=encoding, power_of_two=power_of_two),
        fp8_ds_mla(128, 0, encoding=encoding, power_of_two=power_of_two),
    ]
    source = torch.Generator().manual_seed(3)
    sizes = 2.0 ** torch.randint(-20, 14, (60, 1), generator=source)
    rows = (torch.randn(60, 128, generator=source) * sizes).clamp(-60000, 60000).to(dtype)
    rows[0], rows[1, 1:] = 0, 0
    for cache_format in formats:
        coded, scale = quantize(rows, cache_format.rule, encoding)
        for row in range(60):
            wanted = encode_row(rows[row], cache_format)
            assert bytes(coded[row].view(torch.uint8).tolist()) == wanted["values"]
            assert bytes(scale[row].view(torch.uint8).tolist()) == wanted["scale"]


@ENCODINGS
def test_a_power_of_two_scale_is_one_and_is_rounded_up(encoding):
    rule = WriteRule(amax_floor=1e-4, fp8_max=FP8_MAX[encoding], power_of_two=True)
    amax = torch.tensor([rule.fp8_max, rule.fp8_max * (1 + 2**-20), rule.fp8_max / 4, rule.fp8_max * 0.26, 0.0])
    _, scale = quantize(amax.unsqueeze(1), rule, encoding)
    assert scale[:4, 0].tolist() == [1.0, 2.0, 0.25, 0.5]
    exponent = torch.log2(scale[4, 0])
    assert exponent == exponent.round()
    assert scale[4, 0] >= 1e-4 / rule.fp8_max


@ENCODINGS
@given(st.floats(2.0**-100, 2.0**100), st.booleans())
def test_nothing_saturates_and_half_a_step_is_the_largest_error(encoding, size, power_of_two):
    rule = WriteRule(amax_floor=0.0, fp8_max=FP8_MAX[encoding], power_of_two=power_of_two)
    values = torch.linspace(-1, 1, 64) * size
    coded, scale = quantize(values, rule, encoding)
    back = coded.float() * scale
    assert (coded.float().abs() <= rule.fp8_max).all()
    step = torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10)
    assert ((back - values).abs() <= step * (1 + 2**-20)).all()


def test_a_nan_makes_its_group_nan_and_no_other():
    rule = index_fp8(4).rule
    values = torch.ones(3, 2, 4)
    values[1, 0, 2] = torch.nan
    coded, scale = quantize(values, rule, "fp8")
    bad = torch.zeros(3, 2, dtype=torch.bool)
    bad[1, 0] = True
    assert torch.equal(scale[..., 0].isnan(), bad)
    assert torch.equal(coded.float().isnan().all(-1), bad)
    assert torch.equal(coded.float().isnan().any(-1), bad)


@ENCODINGS
def test_index_queries_get_one_scale_a_head(encoding):
    source = torch.Generator().manual_seed(5)
    queries = torch.randn(7, 3, 32, generator=source) * torch.tensor([1e-6, 1.0, 1e4])[:, None]
    queries[6, 1] = 0
    coded, scale = quantize_index_q(queries, encoding)
    assert coded.dtype == getattr(torch, DTYPE_NAMES[encoding])
    assert scale.shape == (7, 3)
    assert torch.equal(torch.log2(scale), torch.log2(scale).round())
    back = coded.float() * scale.unsqueeze(-1)
    amax = queries.abs().amax(-1, keepdim=True)
    assert ((back - queries).abs() <= amax * 2.0**-4).all()
    assert (coded[6, 1].float() == 0).all()


@ENCODINGS
def test_the_scale_of_a_query_head_can_be_folded_into_its_weight(encoding):
    source = torch.Generator().manual_seed(6)
    queries, key = torch.randn(5, 4, 16, generator=source), torch.randn(16, generator=source)
    coded, scale = quantize_index_q(queries, encoding)
    weights = torch.randn(5, 4, generator=source)
    folded = ((coded.float() @ key).relu() * (weights * scale)).sum(-1)
    unfolded = (((coded.float() * scale.unsqueeze(-1)) @ key).relu() * weights).sum(-1)
    torch.testing.assert_close(folded, unfolded, rtol=1e-5, atol=1e-6)
