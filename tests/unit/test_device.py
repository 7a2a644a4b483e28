from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparse_mla.device import KNOWN, Device, probe
from sparse_mla.errors import UsageError


def test_the_cpu_is_probed_with_its_cores():
    device = probe()
    assert (device.kind, device.arch, device.shared_bytes, device.fp8) == ("cpu", "cpu", 0, "")
    assert device.units >= 1
    assert device.name
    assert probe("cpu") == probe(torch.device("cpu")) == device


@pytest.mark.parametrize("arch", KNOWN)
def test_every_known_architecture_answers_by_name(arch):
    device = Device.named(arch)
    assert device.arch == arch
    assert device.kind in {"cpu", "cuda", "rocm"}
    assert device.kind == ("rocm" if arch.startswith("gfx") else "cuda" if arch.startswith("sm") else "cpu")
    assert device.fp8 in {"", "fp8", "fp8fnuz"}
    assert device.units > 0
    assert device.name


def test_fp8_is_the_hardwares():
    assert {arch for arch, device in KNOWN.items() if device.fp8 == "fp8fnuz"} == {"gfx942"}
    assert {arch for arch, device in KNOWN.items() if not device.fp8} == {"cpu", "sm80", "sm86", "gfx1100", "gfx1151"}


@pytest.mark.parametrize("arch", ["", "sm70", "SM90", "gfx90a", "cuda"])
def test_an_unknown_architecture_lists_the_known_ones(arch):
    with pytest.raises(UsageError) as caught:
        Device.named(arch)
    assert repr(arch) in str(caught.value)
    assert all(known in str(caught.value) for known in KNOWN)


@pytest.mark.parametrize("where", ["meta", "mps", "xpu"])
def test_a_device_that_is_neither_cpu_nor_gpu_is_refused(where):
    with pytest.raises(UsageError, match=f"device {where}: needs a CPU, or a GPU that this torch sees"):
        probe(where)


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="device cuda:1"):
        probe("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="device cuda"):
        probe("cuda")


def fake_gpu(monkeypatch, hip=None, **facts):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "hip", hip)
    defaults = {"name": "card", "multi_processor_count": 7, "L2_cache_size": 99, "major": 9, "minor": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda where: SimpleNamespace(**defaults | facts))


def test_an_nvidia_gpu(monkeypatch):
    fake_gpu(monkeypatch, shared_memory_per_block_optin=232448)
    assert probe("cuda") == Device(
        kind="cuda", arch="sm90", units=7, l2_bytes=99, shared_bytes=232448, fp8="fp8", name="card"
    )


def test_an_amd_gpu_drops_its_feature_flags_and_takes_lds_from_the_table(monkeypatch):
    fake_gpu(monkeypatch, hip="6.4", gcnArchName="gfx942:sramecc+:xnack-")
    device = probe("cuda:0")
    assert (device.kind, device.arch, device.fp8) == ("rocm", "gfx942", "fp8fnuz")
    assert device.shared_bytes == KNOWN["gfx942"].shared_bytes


def test_an_architecture_outside_the_table_keeps_its_name_and_gets_no_fp8(monkeypatch):
    fake_gpu(monkeypatch, major=13, minor=7)
    device = probe("cuda")
    assert (device.arch, device.fp8, device.shared_bytes) == ("sm137", "", 0)
