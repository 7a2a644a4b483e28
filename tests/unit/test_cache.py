from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.cache import CacheFormat, CacheView, Field, fp8_ds_mla, index_fp8, plain
from sparse_mla.errors import CacheFormatError
from sparse_mla.reference.write import field_bytes

FORMATS = {
    "plain:bf16": plain(576, "bf16"),
    "plain:f16": plain(128, "f16"),
    "plain:f32": plain(33, "f32"),
    "index_fp8": index_fp8(128),
    "index_fp8:fnuz": index_fp8(64, encoding="fp8fnuz", power_of_two=False),
    "fp8_ds_mla": fp8_ds_mla(),
    "fp8_ds_mla:fnuz": fp8_ds_mla(256, 32, encoding="fp8fnuz"),
}
formats = pytest.mark.parametrize("cache_format", FORMATS.values(), ids=FORMATS)


def view_of(cache_format, block_size=16, num_blocks=3, gap=0, offset=0):
    stride = block_size * cache_format.row_bytes + gap
    storage = torch.zeros(offset + num_blocks * stride, dtype=torch.uint8)
    return CacheView(
        storage=storage,
        format=cache_format,
        block_size=block_size,
        block_stride_bytes=stride,
        num_blocks=num_blocks,
        offset_bytes=offset,
    )


def test_row_bytes_are_the_engines():
    assert fp8_ds_mla().row_bytes == 656  # 512 values, 4 scales of 4, 64 rope values of 2
    assert index_fp8(128).row_bytes == 132
    assert plain(576, "bf16").row_bytes == 1152
    assert 78 * (plain(576, "bf16").row_bytes + index_fp8(128).row_bytes) == 100152  # GLM-5.1, a token in all layers


def test_write_rules_are_the_engines():
    assert index_fp8(128).rule.amax_floor == 1e-4
    assert index_fp8(128).rule.power_of_two
    assert not fp8_ds_mla().rule.power_of_two
    assert fp8_ds_mla().rule.amax_floor == 448 * 2.0**-126
    assert (index_fp8(8).rule.fp8_max, index_fp8(8, encoding="fp8fnuz").rule.fp8_max) == (448, 224)
    assert plain(8, "bf16").rule is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: plain(8, "fp8"), "needs bf16, f16 or f32, got fp8"),
        (lambda: plain(8, "f64"), "got f64"),
        (lambda: index_fp8(8, encoding="e5m2"), "needs fp8 or fp8fnuz, got e5m2"),
        (lambda: fp8_ds_mla(500), "a multiple of 128, got 500"),
        (lambda: fp8_ds_mla(512, encoding="bf16"), "fp8 encoding"),
    ],
)
def test_formats_that_do_not_exist(make, said):
    with pytest.raises(CacheFormatError, match=said):
        make()


def test_a_planar_block_holds_values_then_scales_and_a_row_major_one_row_after_row():
    planar = index_fp8(128)
    assert planar.place("values", 64)[1:] == (0, 128)
    assert planar.place("scale", 64)[1:] == (64 * 128, 4)
    rows = fp8_ds_mla()
    assert rows.place("values", 64)[1:] == (0, 656)
    assert rows.place("scale", 64)[1:] == (512, 656)
    assert rows.place("rope", 64)[1:] == (528, 656)


def test_an_unknown_field_names_those_that_exist():
    with pytest.raises(CacheFormatError, match=r"no field 'rope'.*values.*scale"):
        index_fp8(128).place("rope", 64)


def test_formats_compare_by_value_and_cannot_be_changed():
    assert fp8_ds_mla() == fp8_ds_mla()
    assert fp8_ds_mla() != fp8_ds_mla(encoding="fp8fnuz")
    assert fp8_ds_mla() != fp8_ds_mla(power_of_two=True)
    assert len({plain(8, "bf16"), plain(8, "bf16"), plain(8, "f16")}) == 2
    with pytest.raises(FrozenInstanceError):
        plain(8, "bf16").width = 9
    assert str(fp8_ds_mla()) == "fp8_ds_mla[576 fp8]"


@formats
@pytest.mark.parametrize(("block_size", "gap", "offset"), [(1, 0, 0), (16, 64, 128), (33, 4, 8), (64, 0, 4)])
def test_fields_are_strided_windows_on_the_bytes_that_the_reference_counts(cache_format, block_size, gap, offset):
    view = view_of(cache_format, block_size, 3, gap, offset)
    for field in cache_format.fields:
        for slot in (0, block_size - 1, block_size, 3 * block_size - 1):
            view.storage.zero_()
            start, count = field_bytes(view, slot, field)
            view.storage[start : start + count] = 0x2A
            window = view.field(field.name).view(torch.uint8)
            row = window[slot // block_size, slot % block_size]
            assert row.unique().tolist() == [0x2A]
            assert int((window == 0x2A).sum()) == count
            flat = view.rows(field.name)
            if flat is not None:
                rows, pitch = flat
                number = slot // block_size * pitch + slot % block_size
                assert rows[number].view(torch.uint8).unique().tolist() == [0x2A]


@formats
def test_windows_share_the_engines_memory(cache_format):
    view = view_of(cache_format, gap=64)
    for field in cache_format.fields:
        assert view.field(field.name).untyped_storage().data_ptr() == view.storage.untyped_storage().data_ptr()


def test_no_single_stride_reaches_rows_of_ragged_planar_blocks():
    assert view_of(index_fp8(128), 16).rows("values") is None  # 16 * 132 bytes is no multiple of 128
    assert view_of(index_fp8(128), 16).rows("scale")[1] == 528
    assert view_of(index_fp8(128), 32).rows("values")[1] == 33
    assert view_of(plain(576, "bf16"), 16, gap=4).rows("values") is None
    assert view_of(index_fp8(128), 1).rows("values")[1] == 1


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 6), st.integers(0, 3))
def test_the_last_row_ends_inside_the_memory_or_the_view_is_refused(block_size, num_blocks, gap, missing):
    row = plain(4, "f32")
    stride = block_size * row.row_bytes + gap * 4
    end = (num_blocks - 1) * stride + block_size * row.row_bytes if num_blocks else 0
    storage = torch.zeros(max(end - missing, 0), dtype=torch.uint8)
    make = {
        "storage": storage,
        "format": row,
        "block_size": block_size,
        "block_stride_bytes": stride,
        "num_blocks": num_blocks,
    }
    if missing and num_blocks:
        with pytest.raises(CacheFormatError, match=f"needs {end} bytes, got {storage.numel()}"):
            CacheView(**make)
    else:
        view = CacheView(**make)
        assert view.num_slots == num_blocks * block_size
        assert view.field("values").shape == (num_blocks, block_size, 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 0}, "positive sizes"),
        ({"block_size": -1}, "positive sizes"),
        ({"num_blocks": -1}, "positive sizes"),
        ({"offset_bytes": -4}, "positive sizes"),
        ({"block_stride_bytes": 16 * 656 - 4}, "block stride"),
        ({"num_blocks": 4}, "cache view of 4 blocks"),
        ({"offset_bytes": 1, "num_blocks": 1}, "not aligned"),
        ({"block_stride_bytes": 16 * 656 + 2, "num_blocks": 1}, "not aligned"),
    ],
)
def test_views_that_cannot_be(change, said):
    with pytest.raises(CacheFormatError, match=said):
        replace(view_of(fp8_ds_mla()), **change)


def test_a_view_of_an_engines_tensor():
    pool = torch.zeros(5, 2, 16, 656, dtype=torch.uint8)
    view = CacheView.of(pool[:, 1], fp8_ds_mla())
    assert (view.block_size, view.num_blocks) == (16, 5)
    assert view.block_stride_bytes == 2 * 16 * 656
    assert view.offset_bytes == 16 * 656
    view.field("scale")[4, 15, 3] = 1.5
    assert pool[4, 1, 15, 524:528].view(torch.float32).item() == 1.5
    assert int(pool[:, 0].count_nonzero()) == 0


def test_a_view_of_wider_items():
    blocks = torch.zeros(3, 16, 576, dtype=torch.bfloat16)
    view = CacheView.of(blocks[1:], plain(576, "bf16"))
    view.field("values")[0, 0, 0] = 2.0
    assert blocks[1, 0, 0] == 2.0
    one = CacheView.of(blocks[:1], plain(576, "bf16"))
    assert (one.num_blocks, one.block_stride_bytes) == (1, 16 * 1152)
    single_rows = CacheView.of(torch.zeros(7, 1, 576, dtype=torch.bfloat16), plain(576, "bf16"))
    assert single_rows.num_slots == 7
    # Blocks of one token that lie apart: nothing follows a row inside its block.
    apart = torch.zeros(7, 3, 576, dtype=torch.bfloat16)[:, :1].as_strided((7, 1, 576), (3 * 576, 5, 1))
    assert CacheView.of(apart, plain(576, "bf16")).block_stride_bytes == 3 * 1152


@pytest.mark.parametrize(
    "blocks",
    [
        torch.zeros(3, 16, 655, dtype=torch.uint8),
        torch.zeros(3, 16, 656),
        torch.zeros(48, 656, dtype=torch.uint8),
        torch.zeros(3, 16, 1, 656, dtype=torch.uint8),
    ],
    ids=["width", "item size", "rank 2", "rank 4"],
)
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(blocks):
    with pytest.raises(CacheFormatError) as caught:
        CacheView.of(blocks, fp8_ds_mla())
    assert "656 bytes" in str(caught.value)
    assert str(list(blocks.shape)) in str(caught.value)


@pytest.mark.parametrize(
    "blocks",
    [
        torch.zeros(3, 16, 1312, dtype=torch.uint8)[:, :, ::2],
        torch.zeros(3, 32, 656, dtype=torch.uint8)[:, ::2],
        torch.zeros(3, 656, 16, dtype=torch.uint8).transpose(1, 2),
        torch.zeros(16, 3, 656, dtype=torch.uint8).transpose(0, 1),
    ],
    ids=["every second byte", "every second row", "columns", "blocks inside rows"],
)
def test_rows_that_are_not_dense_inside_a_block_are_refused(blocks):
    with pytest.raises(CacheFormatError, match="rows that follow each other"):
        CacheView.of(blocks, fp8_ds_mla())


def test_an_empty_cache():
    view = view_of(plain(8, "f32"), num_blocks=0)
    assert view.num_slots == 0
    rows, _ = view.rows("values")
    assert rows.shape == (0, 8)


def test_a_custom_table_is_a_format_like_any_other():
    fields = (Field(name="values", dtype="u8", count=3), Field(name="mark", dtype="u8", count=1))
    own = CacheFormat(name="own", width=3, fields=fields)
    assert own.row_bytes == 4
    assert view_of(own).field("mark").shape == (3, 16, 1)
