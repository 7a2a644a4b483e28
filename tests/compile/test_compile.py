"""Each kernel's worst configuration compiles for every architecture of the table and fits. Needs no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cross import compile_for, compiled_for, record
from worst import worst_launches

from sparse_mla.backends.table import TRITON_ARCHS
from sparse_mla.backends.triton.gather_ceiling import ways_to_gather
from sparse_mla.device import Device

WORST = (
    "attend_rows, tiles of 16 heads, split",
    "attend_rows, tiles of 32 heads, looped",
    "attend_rows, tiles of 64 heads, looped",
    "copy_rows",
    "locate",
    "merge_parts",
    "pick",
    "pick_failed",
    "quantise_rows",
    "score_rows, keep",
    "score_tiles, keep",
    "set_limits",
)
"""Of each kernel what takes most; `make matrix` compiles the rest too."""
REGISTERS = {"cuda": 255, "rocm": 512}


@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_worst_configurations_fit(arch):
    device = Device.named(arch)
    launches = worst_launches(device)
    assert {launch.name for launch in launches.values()} == {name.partition(",")[0] for name in WORST}
    for name, launch in launches.items():
        if not name.startswith(WORST):
            continue
        took = compile_for(launch, device)
        assert took.shared_bytes <= device.shared_bytes, f"{name}: {took}"
        assert 0 < took.registers <= REGISTERS[device.kind], f"{name}: {took}"


@pytest.mark.parametrize("arch", TRITON_ARCHS)
def test_most_ways_to_measure_the_gather_ceiling_fit(arch):
    """The bench passes over a way that does not; it must not be left with none."""
    device, rows = Device.named(arch), torch.zeros(1, 288, dtype=torch.int32)
    launches = record(lambda: [way() for way in ways_to_gather(rows, rows.new_zeros(1, 2048))])
    took = [compile_for(launch, device) for launch in launches]
    assert len(took) == 6
    assert sum(one.shared_bytes <= device.shared_bytes for one in took) >= 3, took


MEMORY = re.compile(r"\b(ld\.(global|volatile)|st\.global|cp\.async|atom|red)\b")


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_kernels_that_start_early_wait_before_they_touch_memory(arch):
    device, waited = Device.named(arch), 0
    for name, launch in worst_launches(device).items():
        lines = compiled_for(launch, device).asm["ptx"].splitlines()
        early = dict(launch.options).get("launch_pdl", False)
        first = next(number for number, line in enumerate(lines) if MEMORY.search(line))
        waits = [number for number, line in enumerate(lines) if "griddepcontrol.wait" in line]
        assert len(waits) == early, name
        assert all(wait < first for wait in waits), name
        waited += early
    assert waited > 10


def test_the_committed_table_is_of_these_sources():
    script = Path(__file__).parents[2] / "scripts" / "compile_matrix.py"
    subprocess.run([sys.executable, script, "--check"], check=True)


def test_the_committed_tables_name_every_cell():
    """Both ends of the supported range, every architecture in its own column, and nothing above its limit."""
    page = (Path(__file__).parents[2] / "docs" / "performance" / "compile-matrix.md").read_text(encoding="utf-8")
    versions = [tuple(map(int, match.split("."))) for match in re.findall(r"^## Triton ([\d.]+)$", page, re.MULTILINE)]
    assert versions[0] == (3, 6, 0) < versions[1]
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) > 2 * 20
    assert {row.count("|") for row in rows} == {len(TRITON_ARCHS) + 2}
    assert "fails" not in "".join(rows)
    assert "**" not in "".join(rows)
