"""The model in vLLM with the plugin, fp8 index keys and chunked prefill, through the script that measures recall."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "recall.py"
OPTIONS = ("--lengths", "2048", "--index-topk", "64", "--chunk", "500", "--depths", "9")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed"),
]


@pytest.mark.parametrize(("selection", "hits"), [("sparse", "#########"), ("last", "........#")])
def test_recall_in_vllm(selection, hits):
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *OPTIONS, "--selection", selection]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["hits"] == hits
