"""What the table of tiles promises, for every architecture and many head counts. Needs no GPU and no Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_mla.backends.table import TRITON_ARCHS
from sparse_mla.backends.triton.scratch import attend_buffers, attend_mode
from sparse_mla.backends.triton.tuning import attend_split, attend_tile
from sparse_mla.cache import plain
from sparse_mla.device import Device
from sparse_mla.testing.geometries import GLM_TP4

HEADS = (1, 8, 16, 17, 24, 32, 33, 40, 64, 128)


def problem(heads, *, deterministic, index_topk=2048, latent=GLM_TP4.latent):
    dims = replace(GLM_TP4.dims, num_heads=heads, index_topk=index_topk)
    return replace(GLM_TP4, dims=dims, latent=latent).problem(
        max_num_tokens=4096, max_num_requests=256, max_model_len=131_072, deterministic=deterministic
    )


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_strict_mode_takes_one_tile_for_prefill_and_decode(arch, heads):
    device = Device.named(arch)
    for deterministic in (True, False):
        asked = problem(heads, deterministic=deterministic)
        prefill, decode = (attend_tile(asked, device, decode=few) for few in (False, True))
        if attend_mode(asked, device) == "strict":
            assert prefill == decode
        else:
            assert not deterministic
            assert decode.heads <= prefill.heads


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_strict_mode_is_the_default_where_it_costs_nothing(arch, heads):
    device = Device.named(arch)
    free = heads <= (16 if device.kind == "rocm" else 32)
    assert attend_mode(problem(heads, deterministic=False), device) == ("strict" if free else "fast")
    assert attend_mode(problem(heads, deterministic=True), device) == "strict"


@pytest.mark.parametrize("index_topk", [1, 63, 64, 512, 2048, 2049])
@pytest.mark.parametrize("latent", [plain(576, "bf16"), plain(576, "f32")], ids=["bf16", "f32"])
@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_segments_start_where_tiles_do_and_scratch_holds_them(arch, latent, index_topk):
    device = Device.named(arch)
    for heads in HEADS:
        for deterministic in (True, False):
            asked = problem(heads, deterministic=deterministic, index_topk=index_topk, latent=latent)
            split = attend_split(asked, device)
            assert split.parts * split.segment >= index_topk > (split.parts - 1) * split.segment
            for decode in (False, True):
                assert split.segment % attend_tile(asked, device, decode=decode).keys == 0
            buffers = {buffer.name: buffer.shape for buffer in attend_buffers(asked, device, 0)}
            places = buffers["places"][1]
            assert places >= split.parts * split.segment  # the last tile of a list is read whole
            if split.parts > 1:
                assert buffers["part"] == (split.rows, split.parts, heads, 512)
                tiles = -(-heads // attend_tile(asked, device, decode=True).heads)
                assert split.rows == 1 or 2 * split.rows * tiles <= device.units
