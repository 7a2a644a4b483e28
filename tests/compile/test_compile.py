"""Each kernel's worst configuration compiles for every architecture of the table and fits. Needs no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cross import compile_for
from worst import worst_launches

from sparse_mla.backends.table import TRITON_ARCHS
from sparse_mla.device import Device

HEAVY = (
    "score_tiles, keep",
    "score_rows, keep",
    "pick",
    "attend_rows, 64 heads, looped",
    "attend_rows, 16 heads, split",
)
REGISTERS = {"cuda": 255, "rocm": 512}


@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_worst_configurations_fit(arch):
    device = Device.named(arch)
    launches = worst_launches(device)
    heavy = {name: launch for name, launch in launches.items() if name.startswith(HEAVY)}
    assert len(heavy) >= len(HEAVY)
    for name, launch in heavy.items():
        took = compile_for(launch, device)
        assert took.shared_bytes <= device.shared_bytes, f"{name}: {took}"
        assert 0 < took.registers <= REGISTERS[device.kind], f"{name}: {took}"


def test_the_committed_table_is_of_these_sources():
    script = Path(__file__).parents[2] / "scripts" / "compile_matrix.py"
    subprocess.run([sys.executable, script, "--check"], check=True)
