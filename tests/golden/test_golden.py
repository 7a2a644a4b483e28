"""Committed answers: decisions for every known device, and the bytes of cache rows."""

from __future__ import annotations

import json

import pytest
import torch
from cache_rows import FILE as ROWS_FILE
from cache_rows import FORMATS, ROWS, cache_rows, row
from decisions import FILE as DECISIONS_FILE
from decisions import decisions

from sparse_mla.cache import CacheView
from sparse_mla.reference.write import field_bytes
from sparse_mla.testing.candidates import from_table
from sparse_mla.testing.geometries import Geometry, sizes


def test_decisions_for_devices_that_are_not_here():
    committed, now = DECISIONS_FILE.read_text().splitlines(), decisions()
    changed = [f"-{old}\n+{new}" for old, new in zip(committed, now, strict=False) if old != new]
    assert not changed, "\n".join([*changed[:6], "python tests/golden/decisions.py rewrites them"])
    assert len(committed) == len(now)


def test_every_stage_of_every_device_has_a_backend_and_its_scratch_in_three_contexts():
    for line in DECISIONS_FILE.read_text().splitlines():
        assert line.count(":") >= 4, line


def test_the_reference_encodes_the_committed_rows():
    assert cache_rows() == json.loads(ROWS_FILE.read_text())


def write_rows(cache_format, rows, view):
    """The rows through eager's verb, into the first slots of the view."""
    latent = cache_format.name != "index_fp8"
    rank, rope = (256, 16) if cache_format.name == "fp8_ds_mla" else (cache_format.width - 16, 16)
    dims = sizes(1, 1, 4, index_dim=64, rank=rank, rope=rope)
    kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[rows.dtype]
    formats = {"latent": cache_format, "index": FORMATS["index_fp8 fp8 amax"]}
    if not latent:
        formats = {"latent": FORMATS["plain bf16"], "index": cache_format}
        dims = sizes(1, 1, 4, index_dim=64, rank=128, rope=16)
    geometry = Geometry(name="golden", dims=dims, dtype=kind, **formats)
    verbs = from_table("eager").operator(geometry.problem(max_num_tokens=8, max_num_requests=1, max_model_len=8))
    slots = torch.arange(rows.shape[0])
    if latent:
        verbs.write_latent(rows[:, :rank], rows[:, rank:], view, slots)
    else:
        verbs.write_index(rows, view, slots)


@pytest.mark.parametrize("name", FORMATS)
def test_eager_writes_the_committed_rows(name):
    cache_format = FORMATS[name]
    view = CacheView(
        storage=torch.zeros(2 * 4 * cache_format.row_bytes, dtype=torch.uint8),
        format=cache_format,
        block_size=4,
        block_stride_bytes=4 * cache_format.row_bytes,
        num_blocks=2,
    )
    rows = torch.stack([row(number, cache_format.width) for number in range(ROWS)])
    write_rows(cache_format, rows.to(torch.float16 if name == "plain f16" else torch.float32), view)
    for number, wanted in enumerate(json.loads(ROWS_FILE.read_text())[name]):
        for field in cache_format.fields:
            start, count = field_bytes(view, number, field)
            assert bytes(view.storage[start : start + count].tolist()).hex() == wanted[field.name], f"row {number}"


def test_the_committed_rows_tell_the_rules_apart():
    committed = json.loads(ROWS_FILE.read_text())
    for name in ("index_fp8", "fp8_ds_mla"):
        variants = [json.dumps(committed[other]) for other in committed if other.startswith(name)]
        assert len(set(variants)) == 4


def test_a_row_that_can_be_checked_by_hand():
    """Row 3 is all zeros: the floor 1e-4 / 448 rounds up to 2^-22, and 448 · 2^-126 / 448 is the smallest normal."""
    committed = json.loads(ROWS_FILE.read_text())
    zeros = committed["index_fp8 fp8 power of two"][3]
    assert set(bytes.fromhex(zeros["values"])) == {0x00, 0x80}  # zeros keep their signs
    assert torch.frombuffer(bytearray.fromhex(zeros["scale"]), dtype=torch.float32).tolist() == [2.0**-22]
    latent = committed["fp8_ds_mla fp8 amax"][3]
    assert torch.frombuffer(bytearray.fromhex(latent["scale"]), dtype=torch.float32).tolist() == [2.0**-126] * 2
