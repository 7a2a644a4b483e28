"""The memory guard refuses before anything is allocated, and only where the system says how much is free."""

from __future__ import annotations

import pytest

from sparse_mla.errors import NotCheckableError
from sparse_mla.verify import memory
from sparse_mla.verify.operators import OperatorOptions, verify_operators
from sparse_mla.verify.progress import Steps


def test_the_container_limit_counts(tmp_path, monkeypatch):
    limit, usage = tmp_path / "max", tmp_path / "current"
    limit.write_text("5000\n")
    usage.write_text("1000\n")
    monkeypatch.setattr(memory, "_CGROUPS", ((str(limit), str(usage)),))
    monkeypatch.setattr(memory, "_meminfo", lambda _: 9000)
    assert memory.free_host_bytes() == 4000
    limit.write_text("max\n")
    assert memory.free_host_bytes() == 9000


def test_what_the_kernel_calls_available_is_read():
    assert memory.free_host_bytes() > 1 << 20
    assert memory._meminfo("NoSuchKey") is None


def test_unknown_memory_refuses_nothing():
    memory.require("a case", 1 << 60, None)


def test_too_little_memory_is_one_line_and_exit_3(monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 30)
    with (
        Steps(quiet=True) as steps,
        pytest.raises(NotCheckableError, match="too little memory for 100,000 tokens") as caught,
    ):
        verify_operators(OperatorOptions(), steps)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
