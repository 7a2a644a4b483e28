"""The specification against definitions written out by hand, value by value."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.cache import FP8_MAX, CacheView, fp8_ds_mla, index_fp8, plain
from sparse_mla.reference.attend import attend
from sparse_mla.reference.select import scores, top
from sparse_mla.reference.write import decode_rows, encode_row, field_bytes, fp8_values
from sparse_mla.shapes import DTYPE_NAMES

ENCODINGS = pytest.mark.parametrize("encoding", ["fp8", "fp8fnuz"])


@ENCODINGS
def test_the_values_of_all_bytes_are_torchs(encoding):
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(getattr(torch, DTYPE_NAMES[encoding])).double()
    torch.testing.assert_close(
        torch.tensor(fp8_values(encoding), dtype=torch.float64), wanted, rtol=0, atol=0, equal_nan=True
    )


def test_bytes_that_differ_between_the_encodings():
    ocp, fnuz = fp8_values("fp8"), fp8_values("fp8fnuz")
    assert math.isnan(ocp[0x7F])
    assert math.isnan(ocp[0xFF])
    assert ocp[0x7E] == 448
    assert math.copysign(1, ocp[0x80]) == -1
    assert fnuz[0x7F] == 240
    assert math.isnan(fnuz[0x80])
    assert sum(map(math.isnan, fnuz)) == 1
    assert all(a == 2 * b for a, b in zip(ocp[:0x7F], fnuz[:0x7F], strict=True))


@ENCODINGS
def test_rounding_is_to_nearest_and_ties_go_to_even(encoding):
    largest = FP8_MAX[encoding]
    finite = sorted(value for value in fp8_values(encoding) if value == value and abs(value) <= largest)
    middles = [(low + high) / 2 for low, high in pairwise(finite)]
    values = torch.tensor(finite + middles + [math.nextafter(middle, math.inf) for middle in middles[::7]])
    width = -(-len(values) // 127) * 127
    values = torch.nn.functional.pad(values, (0, width - len(values))).view(-1, 127)
    rows = torch.nn.functional.pad(values, (1, 0), value=largest)  # the scale is 1
    cache_format = index_fp8(128, encoding=encoding)
    for row in rows:
        coded = encode_row(row, cache_format)
        assert struct.unpack("<f", coded["scale"]) == (1.0,)
        wanted = row.to(getattr(torch, DTYPE_NAMES[encoding])).view(torch.uint8)
        assert list(coded["values"]) == wanted.tolist()


def test_groups_of_128_have_their_own_scales_and_rope_is_kept():
    row = torch.cat([torch.full((128,), 2.0**k) for k in (0, 3, -5, 9)] + [torch.arange(64.0)])
    coded = encode_row(row, fp8_ds_mla())
    scales = struct.unpack("<4f", coded["scale"])
    assert scales == tuple(struct.unpack("<f", struct.pack("<f", 2.0**k / 448))[0] for k in (0, 3, -5, 9))
    assert set(coded["values"]) == {0x7E}  # every value is its group's largest
    assert coded["rope"] == bytes(torch.arange(64.0).bfloat16().view(torch.uint8).tolist())


def test_plain_rows_are_their_bytes():
    row = torch.tensor([1.0, -2.5, 0.0, 3e-3])
    for dtype, kind in (("bf16", torch.bfloat16), ("f16", torch.float16), ("f32", torch.float32)):
        assert encode_row(row, plain(4, dtype)) == {"values": bytes(row.to(kind).view(torch.uint8).tolist())}


@pytest.mark.parametrize("cache_format", [plain(8, "bf16"), index_fp8(8), fp8_ds_mla(128, 8)], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_fields_of_a_cache_do_not_overlap_and_fill_it(cache_format, block_size):
    stride = block_size * cache_format.row_bytes + 8
    view = CacheView(
        storage=torch.zeros(4 * stride + 16, dtype=torch.uint8),
        format=cache_format,
        block_size=block_size,
        block_stride_bytes=stride,
        num_blocks=4,
        offset_bytes=16,
    )
    taken = []
    for slot in range(view.num_slots):
        for field in cache_format.fields:
            start, count = field_bytes(view, slot, field)
            taken += range(start, start + count)
    wanted = [16 + block * stride + byte for block in range(4) for byte in range(stride - 8)]
    assert sorted(taken) == wanted


@pytest.mark.parametrize(
    "cache_format", [plain(20, "f16"), index_fp8(20), fp8_ds_mla(256, 20, encoding="fp8fnuz")], ids=str
)
def test_what_is_encoded_is_decoded(cache_format):
    view = CacheView(
        storage=torch.zeros(6 * 4 * cache_format.row_bytes, dtype=torch.uint8),
        format=cache_format,
        block_size=4,
        block_stride_bytes=4 * cache_format.row_bytes,
        num_blocks=6,
    )
    rows = torch.randn(3, cache_format.width, generator=torch.Generator().manual_seed(1))
    slots = [5, 23, 0]
    for row, slot in zip(rows, slots, strict=True):
        for name, coded in encode_row(row, cache_format).items():
            field = next(field for field in cache_format.fields if field.name == name)
            start, count = field_bytes(view, slot, field)
            view.storage[start : start + count] = torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    got, scale = decode_rows(view, slots)
    back = got * scale[:, None]
    assert (back - rows).abs().max() < rows.abs().max() * 2.0**-4
    assert got.dtype == torch.float64
    empty, none = decode_rows(view, [])
    assert empty.shape == (0, cache_format.width)
    assert none.shape == (0,)


def test_a_score_is_its_formula():
    source = torch.Generator().manual_seed(2)
    q, w = torch.randn(3, 4, generator=source), torch.randn(3, generator=source)
    k, scale = torch.randn(5, 4, generator=source), torch.rand(5, generator=source)
    wanted = [
        float(scale[s])
        * sum(float(w[h]) * max(sum(float(q[h, d]) * float(k[s, d]) for d in range(4)), 0.0) for h in range(3))
        for s in range(5)
    ]
    assert scores(q, w, k, scale).tolist() == pytest.approx(wanted, rel=1e-12)
    assert scores(q, w, k[:0], scale[:0]).shape == (0,)


def test_relu_keeps_a_nan():
    q, w, k = torch.tensor([[1.0]]), torch.ones(1), torch.tensor([[math.nan], [-1.0], [2.0]])
    got = scores(q, w, k, torch.ones(3)).tolist()
    assert math.isnan(got[0])
    assert got[1:] == [0.0, 2.0]


NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan, 1e-300])


@given(st.lists(NUMBERS, max_size=30), st.integers(1, 12))
def test_top_is_a_sort_by_score_then_position(values, topk):
    ranked = sorted((i for i, value in enumerate(values) if value == value), key=lambda i: (-values[i], i))
    assert top(torch.tensor(values, dtype=torch.float64), topk).tolist() == sorted(ranked[:topk])


def test_attention_is_its_formula():
    source = torch.Generator().manual_seed(4)
    q, latent = torch.randn(2, 6, generator=source), torch.randn(5, 6, generator=source)
    out, lse = attend(q, latent, 0.3, 4)
    for head in range(2):
        exponents = [math.exp(0.3 * sum(float(q[head, d]) * float(row[d]) for d in range(6))) for row in latent]
        assert float(lse[head]) == pytest.approx(math.log(sum(exponents)), rel=1e-12)
        for d in range(4):
            wanted = sum(e * float(row[d]) for e, row in zip(exponents, latent, strict=True)) / sum(exponents)
            assert float(out[head, d]) == pytest.approx(wanted, rel=1e-11)


def test_attention_over_nothing_and_over_minus_infinity():
    out, lse = attend(torch.ones(3, 4), torch.ones(0, 4), 1.0, 2)
    assert out.tolist() == [[0.0, 0.0]] * 3
    assert lse.tolist() == [-math.inf] * 3
    out, lse = attend(torch.tensor([[1.0, -math.inf]]), torch.tensor([[5.0, 1.0]]), 1.0, 1)
    assert (out.tolist(), lse.tolist()) == ([[0.0]], [-math.inf])


def test_attention_of_huge_scores_does_not_overflow():
    out, lse = attend(torch.tensor([[1e4]]), torch.tensor([[1e3], [999.0]]), 1.0, 1)
    assert out.tolist() == [[1e3]]
    assert lse.tolist() == [1e7]
