"""The model in vLLM with the plugin, fp8 index keys and chunked prefill: by itself, beside Transformers, and as a control."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_mla.integrations.vllm.seams import SUPPORTED
from sparse_mla.testing.planted import recite
from sparse_mla.verify.engine import CONTROLS, EngineOptions, verify_engine
from sparse_mla.verify.progress import Steps

SCRIPT = Path(__file__).parents[2] / "scripts" / "recall.py"
OPTIONS = ("--lengths", "2048", "--index-topk", "64", "--chunk", "500", "--depths", "9", "--selection", "last")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed"),
]


def test_with_the_last_tokens_alone_only_the_last_fact_is_recalled():
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(SCRIPT), *OPTIONS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["hits"] == "........#"


def test_the_engine_target_asks_it_for_facts_and_agrees_with_transformers(model_folder):
    options = EngineOptions(
        model=str(model_folder), supported=SUPPORTED, lengths=(800,), chunk_tokens=(200,), compared=400
    )
    with Steps(quiet=True) as steps:
        report = verify_engine(options, steps)
    assert [check for check in report.checks if not check.ok] == []
    assert {check.id for check in report.checks} >= {"engine.recall.plans", "engine.logprobs.transformers"}
    assert len(recite(800, 21).spans) == 20
    recall = report.facts["recall"]
    assert recall.pop("800 tokens, chunks of 200") == 1
    assert set(recall) == {f"400 tokens, {name}" for name in CONTROLS}
    assert max(recall.values()) < 0.2
    assert all(moved >= 0.01 for moved in report.facts["controls"].values())
