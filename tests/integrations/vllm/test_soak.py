"""A short soak: see ``scripts/soak.py``, which runs for half an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SOAK = Path(__file__).parents[3] / "scripts" / "soak.py"
REQUESTS = 26  # fewer than may wait for their one-shot runs, so the traffic is the same on every machine


def test_random_traffic_is_answered_as_one_shot_runs_are(vllm_root):
    command = [sys.executable, str(SOAK), "--requests", str(REQUESTS), "--longest", "400", "--seed", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    counts = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert counts["requests"] == REQUESTS
    assert counts["compared"] == REQUESTS - counts["aborted"]
    assert counts["differences"] == 0
    # Each kind of traffic occurred.
    for kind in ("aborted", "cached_tokens", "preemptions", "sampled"):
        assert counts[kind] > 0, kind
    noticed, of = counts["control_last-k"].split()[0:3:2]
    assert noticed == of
