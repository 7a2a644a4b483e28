from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_mla.testing.tiny_model import write_tiny_model

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(scope="session")
def vllm_root() -> Path:
    """Folder of the installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("not checked: vLLM is not installed")
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def run_jobs(vllm_root: Path, tmp_path_factory: pytest.TempPathFactory):
    """Run jobs (see child.py) one after the other in a child process with a real vLLM; returns their results and its log."""

    def run(jobs: list[dict], **environment: str) -> tuple[list[dict], str]:
        folder = tmp_path_factory.mktemp("child")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | environment
        command = [sys.executable, str(CHILD), str(folder / "jobs.json"), str(folder / "results.json")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=880, check=False)
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-4000:]
        return json.loads((folder / "results.json").read_text()), log

    return run
