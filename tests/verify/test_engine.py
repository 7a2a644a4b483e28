"""The engine target on a real vLLM and Transformers, with the generated tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_mla.integrations.vllm.seams import SUPPORTED
from sparse_mla.verify.engine import CONTROLS, EngineOptions, verify_engine
from sparse_mla.verify.progress import Steps

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed"),
]
LENGTH = 608
COMPARED = 320


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSE_MLA_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def report(cache):
    options = EngineOptions(
        model="tiny", supported=SUPPORTED, lengths=(LENGTH,), chunk_tokens=(256, 112), compared=COMPARED
    )
    with Steps(quiet=True) as steps:
        return verify_engine(options, steps)


def test_vllm_is_verified_on_a_tiny_model(report):
    assert [check for check in report.checks if not check.ok] == []
    assert {check.id for check in report.checks} >= {
        "engine.write.plans",
        "engine.select.plans",
        "engine.attend.plans",
        "engine.tokens.plans",
        "engine.logprobs.plans",
        "engine.select.reference",
        "engine.logprobs.transformers",
        *(f"engine.control.{name}" for name in CONTROLS),
    }


def test_every_plan_was_chunked_and_hashed(report):
    (case,) = report.cases
    assert [plan["calls"] for plan in case["plans"]] == [3, 6]
    hashes = [plan["sha256"] for plan in case["plans"]]
    assert hashes[0] == hashes[1]
    assert all(len(value) == 64 for value in hashes[0].values())
    assert len(set(hashes[0].values())) == len(hashes[0])


def test_the_report_names_what_served(report):
    facts = report.to_json()["facts"]
    assert facts["engine"]["version"].startswith("0.32")
    assert {item["backend"] for item in facts["stages"].values()} == {"eager"}
    assert facts["index_topk"] == 64
    assert facts["compared_tokens"] == COMPARED
    assert all(moved >= 0.01 for moved in facts["controls"].values())
    json.dumps(report.to_json(), allow_nan=False)


def processes() -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def test_interrupting_leaves_no_child_behind(cache, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "sparse_mla", "verify", "--engine", "vllm", "--model", "tiny", "--quick"]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def children() -> list[int]:
        return [pid for pid, line in processes().items() if str(tmp_path) in line]

    ends = time.monotonic() + 120
    while not children():
        assert time.monotonic() < ends
        time.sleep(0.1)
    parent.send_signal(signal.SIGINT)
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "sparse-mla verify: interrupted"
    ends = time.monotonic() + 10
    while children():  # killed, but perhaps not yet reaped
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) == []
