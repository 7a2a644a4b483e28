"""GPU evidence: what the vendors' tools print, absent tools, hanging ones and ones that print something else.

The tools here are small scripts on PATH; their outputs are written after the documented formats, not recorded on devices.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from sparse_mla.doctor import gpus
from sparse_mla.doctor.gpus import found, outputs_of

NVIDIA = "NVIDIA H200, 9.0, 143771, 580.10\nNVIDIA H200, 9.0, 143771, 580.10\n"


def amd_smi(**more):
    entry = {
        "gpu": 0,
        "asic": {
            "market_name": "AMD Instinct MI355X",
            "vendor_id": "0x1002",
            "num_compute_units": 256,
            "target_graphics_version": "gfx950",
        },
        "driver": {"name": "amdgpu", "version": "6.14.14"},
        "vram": {"type": "HBM", "size": {"value": 294896, "unit": "MB"}, "bit_width": 8192},
    }
    return [{**entry, **more, "gpu": number} for number in range(2)]


ROCMINFO = """ROCk module version 6.12.12 is loaded
=====================
HSA System Attributes
=====================
Runtime Version:         1.15
==========
HSA Agents
==========
*******
Agent 1
*******
  Name:                    AMD EPYC 9575F 64-Core Processor
  Uuid:                    CPU-XX
  Marketing Name:          AMD EPYC 9575F 64-Core Processor
  Device Type:             CPU
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: FINE GRAINED
      Size:                    1583276544(0x5e5ebe00) KB
*******
Agent 2
*******
  Name:                    gfx1201
  Uuid:                    GPU-2f1c
  Marketing Name:          AMD Radeon AI PRO R9700
  Vendor Name:             AMD
  Device Type:             GPU
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    33406976(0x1fdc000) KB
    Pool 2
      Segment:                 GROUP
      Size:                    64(0x40) KB
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx1201
*** Done ***
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Writes small scripts in front of PATH; nothing else that could be asked stays on it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for needed in ("sh", "cat", "sleep", "yes"):
        (folder / needed).symlink_to(shutil.which(needed))
    monkeypatch.setenv("PATH", str(folder))

    def write(name, text=None, script=None):
        (folder / f"{name}.out").write_text(text or "")
        (folder / name).write_text(f"#!/bin/sh\n{script or f'cat {folder}/{name}.out'}\n")
        (folder / name).chmod(0o755)

    return write


@pytest.fixture
def sysfs(tmp_path):
    """Writes a node of AMD's compute driver and returns the root."""

    def write(version, *, driver=None):
        nodes = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes"
        for node, gfx in (("0", 0), ("1", version)):
            bank = nodes / node / "mem_banks" / "0"
            bank.mkdir(parents=True)
            (nodes / node / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {gfx}\n")
            (bank / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
            (nodes / node / "name").write_text("ip discovery\n")
        if driver:
            (tmp_path / "module" / "amdgpu").mkdir(parents=True)
            (tmp_path / "module" / "amdgpu" / "version").write_text(f"{driver}\n")
        return tmp_path

    return write


def told(answer):
    return [(gpu.source, gpu.vendor, gpu.arch, gpu.name, gpu.memory_bytes >> 20, gpu.driver) for gpu in answer]


def test_nvidia_smi(tools, tmp_path):
    tools("nvidia-smi", NVIDIA)
    assert told(found(sysfs=tmp_path)) == [("nvidia-smi", "nvidia", "sm90", "NVIDIA H200", 143771, "580.10")] * 2


@pytest.mark.parametrize("wrap", [lambda entries: entries, lambda entries: {"gpu_data": entries}])
def test_amd_smi_before_and_since_rocm_7(tools, tmp_path, wrap):
    tools("nvidia-smi", script="exit 9")
    tools("amd-smi", json.dumps(wrap(amd_smi()), indent=4))
    tools("rocminfo", ROCMINFO)
    assert told(found(sysfs=tmp_path)) == [("amd-smi", "amd", "gfx950", "AMD Instinct MI355X", 294896, "6.14.14")] * 2


def test_amd_smi_of_rocm_6_0_names_its_driver_otherwise(tools, tmp_path):
    driver = {"driver_name": "amdgpu", "driver_version": "6.3.6"}
    size = {"value": 64, "unit": "GB"}
    asic = {"market_name": "N/A", "target_graphics_version": "gfx942:sramecc+:xnack-"}
    tools("amd-smi", json.dumps(amd_smi(driver=driver, vram={"size": size}, asic=asic)))
    assert told(found(sysfs=tmp_path)) == [("amd-smi", "amd", "gfx942", "gfx942", 65536, "6.3.6")] * 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "WARNING: User is missing the following required groups: render, video\n",
        "[]",
        "{}",
        "7",
        '{"gpu_data": 7}',
        '{"gpu_data": [7, null, {"asic": []}, {"asic": {"target_graphics_version": "N/A"}}]}',
        "[" * 200_000,
        '[{"asic": {"target_graphics_version": "gfx942"}',
        "\x1b[31m\0\0",
    ],
)
def test_amd_smi_says_something_else_and_rocminfo_answers(tools, tmp_path, text):
    tools("amd-smi", text)
    tools("rocminfo", ROCMINFO)
    expected = ("rocminfo", "amd", "gfx1201", "AMD Radeon AI PRO R9700", 33406976 >> 10, "6.12.12")
    assert told(found(sysfs=tmp_path)) == [expected]


@pytest.mark.parametrize("value", ["N/A", None, -1, 1e99, "9" * 400, {"value": 1}])
def test_memory_that_is_not_stated_is_0(tools, tmp_path, value):
    tools("amd-smi", json.dumps(amd_smi(vram={"size": {"value": value, "unit": "MB"}}, driver="N/A")))
    assert [(gpu.memory_bytes, gpu.driver) for gpu in found(sysfs=tmp_path)] == [(0, "")] * 2


@pytest.mark.parametrize(
    "version", ["", "version \x1b[1m6 is loaded\n", "ROCk module is NOT loaded, possibly no GPU devices\n"]
)
def test_rocminfo_without_a_driver_version(tools, tmp_path, version):
    tools("rocminfo", version + ROCMINFO.partition("\n")[2])
    (gpu,) = found(sysfs=tmp_path)
    assert (gpu.arch, gpu.driver) == ("gfx1201", "")


@pytest.mark.parametrize(
    ("version", "arch"),
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_sysfs_where_no_tool_is(tools, sysfs, version, arch):
    answer = found(sysfs=sysfs(version, driver="6.14.14"))
    assert told(answer) == [("sysfs", "amd", arch, "ip discovery", 206141652992 >> 20, "6.14.14")]


def test_sysfs_that_says_something_else(tools, tmp_path):
    nodes = tmp_path / "class" / "kfd" / "kfd" / "topology" / "nodes"
    (nodes / "0").mkdir(parents=True)
    (nodes / "0" / "properties").write_bytes(b"\xff\xfegfx_target_version x\n" * 9)
    (nodes / "1").write_text("a file")
    assert found(sysfs=tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "NVIDIA, x.y, 1, 2\n", "a, b\n" * 1000, "\x1b[31mNVIDIA-SMI has failed", "a, 12.1, b, c, d\n"],
)
def test_nvidia_smi_says_something_else(tools, tmp_path, text):
    tools("nvidia-smi", text)
    assert found(sysfs=tmp_path) == ()


def test_what_a_tool_cannot_say_stays_unknown_and_is_safe_to_print(tools, tmp_path):
    tools("nvidia-smi", "GPU, 12.1, [N/A], \x1b[1m580\n")
    assert told(found(sysfs=tmp_path)) == [("nvidia-smi", "nvidia", "sm121", "GPU", 0, "580")]


STUCK = {
    "hangs": "sleep 60",
    "leaves a child with its output": "sleep 60 &\nexit 0",
    "prints for ever": "yes NVIDIA",
    "hangs after its answer": f"echo '{NVIDIA.splitlines()[0]}'; sleep 60",
}


@pytest.mark.parametrize("name", STUCK)
def test_stuck_tools_cost_one_time_limit_together(tools, sysfs, name, tmp_path):
    for tool in ("nvidia-smi", "amd-smi", "rocminfo"):
        tools(tool, script=f"echo $$ >> {tmp_path}/started\n{STUCK[name]}")
    began = time.monotonic()
    answer = found(lambda commands: outputs_of(commands, seconds=0.3), sysfs(90500))
    assert time.monotonic() - began < 2
    assert [gpu.source for gpu in answer] == ["sysfs"]
    groups = [int(line) for line in (tmp_path / "started").read_text().split()]
    assert len(groups) == 3
    patience = time.monotonic() + 20  # what was killed may take a while to be gone
    while any(map(any_alive, groups)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(map(any_alive, groups))


def any_alive(group):
    """Whether a process of a group still runs; zombies that their parent has not read yet do not."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    states = subprocess.run(["/bin/ps", "-o", "stat=", "-g", str(group)], capture_output=True, text=True, check=False)
    return any(not state.startswith("Z") for state in states.stdout.split())


def test_a_tool_that_fails_is_silent():
    python = sys.executable
    commands = [
        [python, "-c", "print(1); raise SystemExit(3)"],
        ["/no/such/tool"],
        ["a\0b"],
        [python, "-c", "import sys; sys.stdout.buffer.write(b'a\\xffb')"],
        [python, "-c", "print('x' * (1 << 21))"],
    ]
    assert outputs_of(commands, seconds=20) == ["", "", "", "a\ufffdb", ""]


def test_the_doctor_tells_what_the_tools_said(tools, asks, tmp_path, monkeypatch):
    tools("amd-smi", json.dumps({"gpu_data": amd_smi()}))
    monkeypatch.setattr(gpus, "SYSFS", tmp_path)
    _, result = asks("--static")
    assert result["facts"]["arch"] == {"value": "gfx950", "from": "machine"}
    assert {gpu["driver"] for gpu in result["machine"]["gpus"]} == {"6.14.14"}
    assert result["long_prefill"]["arch"] == "gfx950"
