from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.errors import WorkspaceError
from sparse_mla.workspace import ALIGN, BufferSpec, Workspace, packed_bytes

SPECS = st.lists(
    st.builds(
        BufferSpec,
        name=st.uuids().map(str),
        shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
        dtype=st.sampled_from(["u8", "bf16", "f16", "f32", "i32", "i64", "fp8"]),
    ),
    max_size=5,
)


def test_bytes_of_a_buffer():
    assert BufferSpec(name="a", shape=(3, 5), dtype="f32").nbytes == 60
    assert BufferSpec(name="a", shape=(3, 5), dtype="i64").nbytes == 120
    assert BufferSpec(name="a", shape=(), dtype="u8").nbytes == 1
    assert BufferSpec(name="a", shape=(2**20, 2**20), dtype="f32").nbytes == 2**42
    assert packed_bytes([]) == 0


@given(SPECS)
def test_buffers_are_aligned_disjoint_and_as_many_bytes_as_promised(specs):
    space = Workspace()
    space.reserve(packed_bytes(specs))
    space.fill(0)
    views = space.views(specs)
    assert list(views) == [spec.name for spec in specs]
    ends = []
    for number, spec in enumerate(specs, start=1):
        view = views[spec.name]
        assert tuple(view.shape) == spec.shape
        assert view.data_ptr() % ALIGN == 0 or view.numel() == 0
        view.view(torch.uint8).fill_(number)
        ends.append(view.data_ptr() + spec.nbytes)
    for number, spec in enumerate(specs, start=1):
        assert (views[spec.name].view(torch.uint8) == number).all()  # nobody wrote into it after it was filled
    assert all(space.nbytes >= packed_bytes(specs) for _ in ends)


def test_the_arena_grows_to_the_largest_and_no_further():
    space = Workspace()
    assert space.nbytes == 0
    space.reserve(1000)
    assert space.nbytes == 1000
    before = space.views([BufferSpec(name="a", shape=(1,), dtype="u8")])["a"].data_ptr()
    space.reserve(10)
    assert space.nbytes == 1000
    assert space.views([BufferSpec(name="a", shape=(1,), dtype="u8")])["a"].data_ptr() == before
    space.reserve(5000)
    assert space.nbytes == 5000


def test_a_locked_workspace_refuses_to_grow_and_says_by_how_much():
    space = Workspace()
    space.reserve(100)
    space.lock()
    space.reserve(100)
    with pytest.raises(
        WorkspaceError, match=r"the workspace is locked: needs 101 bytes, got 100\. Reserve before locking\."
    ):
        space.reserve(101)
    assert space.nbytes == 100


def test_a_workspace_that_was_locked_empty_refuses_everything():
    space = Workspace()
    space.lock()
    with pytest.raises(WorkspaceError, match="needs 0 bytes, got 0"):
        space.reserve(0)


def test_scratch_that_nobody_reserved_is_refused():
    spec = BufferSpec(name="a", shape=(300,), dtype="u8")
    space = Workspace()
    with pytest.raises(WorkspaceError, match="scratch was not reserved: needs 512 bytes, got 0"):
        space.views([spec])
    space.reserve(511)
    with pytest.raises(WorkspaceError, match="needs 512 bytes, got 511"):
        space.views([spec])
    space.reserve(512)
    assert space.views([spec])["a"].shape == (300,)


def test_a_stage_without_buffers_needs_only_a_reservation():
    space = Workspace()
    space.reserve(0)
    assert space.views([]) == {}


def test_two_workspaces_share_nothing():
    spec = BufferSpec(name="a", shape=(64,), dtype="u8")
    one, two = Workspace(), Workspace()
    for space in (one, two):
        space.reserve(64 * ALIGN)
    one.fill(1)
    two.fill(2)
    assert (one.views([spec])["a"] == 1).all()
    assert (two.views([spec])["a"] == 2).all()


@pytest.mark.parametrize("byte", [0, 0x7F, 0xFF])
def test_fill_reaches_every_byte(byte):
    space = Workspace()
    space.fill(byte)  # of nothing
    space.reserve(1024)
    space.fill(byte)
    assert (space.views([BufferSpec(name="all", shape=(1024,), dtype="u8")])["all"] == byte).all()
