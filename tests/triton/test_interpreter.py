"""Every Triton kernel in Triton's interpreter, judged by the shipped conformance cases. Needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("interpreted.py")
GROUPS = re.search(r"^GROUPS = \((.*?)\)$", CHILD.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize("group", re.findall(r"\w+", GROUPS))
def test_kernels_in_the_interpreter(group):
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(CHILD), group]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == [group]
