"""Children are watched: results come one by one, failures are one line, and nothing outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_mla.errors import NotCheckableError
from sparse_mla.verify.children import run_jobs
from sparse_mla.verify.progress import Steps

MODULE = """
import os, subprocess, sys, time
from pathlib import Path
from sparse_mla.verify.children import serve

def run(job):
    if job["do"] == "raise":
        raise ValueError("two\\nlines")
    if job["do"] == "tell":
        time.sleep(0.5)
        return {"who": os.environ["WHO"], "value": job["value"]}
    if job["do"] == "die":
        print("last words", flush=True)
        os._exit(7)
    if job["do"] == "hang":
        grandchild = subprocess.Popen(["sleep", "600"])
        Path(job["pids"]).write_text(f"{os.getpid()} {grandchild.pid}")
        time.sleep(600)
    return {"answer": job["value"] * 2}

if __name__ == "__main__":
    serve(run, Path(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "busy_child.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def run(*jobs, limit=60.0, environments=({},)):
        with Steps(quiet=True) as steps:
            return run_jobs("busy_child", jobs, tmp_path / "run", steps, environments=environments, limit_seconds=limit)

    return run


def gone(pid: int) -> bool:
    """Dead, or a zombie that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_results_come_in_order(start):
    jobs = [{"name": f"job {value}", "do": "double", "value": value} for value in range(3)]
    assert start(*jobs) == [{"answer": 0}, {"answer": 2}, {"answer": 4}]


def test_children_side_by_side_share_the_jobs(start):
    jobs = [{"name": f"job {value}", "do": "tell", "value": value} for value in range(6)]
    results = start(*jobs, environments=({"WHO": "one"}, {"WHO": "two"}))
    assert [result["value"] for result in results] == list(range(6))
    assert {result["who"] for result in results} == {"one", "two"}


def test_what_a_job_raises_is_one_line(start):
    with pytest.raises(NotCheckableError, match="broken: got ValueError: two lines") as caught:
        start({"name": "broken", "do": "raise"})
    assert caught.value.exit_code == 3


def test_a_dead_child_leaves_its_last_words(start):
    with pytest.raises(NotCheckableError, match="the child process died: got last words"):
        start({"name": "broken", "do": "die"})


def test_a_child_that_hangs_is_ended_with_all_that_it_started(start, tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(NotCheckableError, match="no result: needs 3 s"):
        start({"name": "slow", "do": "hang", "pids": str(pids)}, limit=3.0)
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: gone(pid))


PARENT = """
import sys
from pathlib import Path
from sparse_mla.verify.children import run_jobs
from sparse_mla.verify.progress import Steps
folder = Path(sys.argv[1])
jobs = [{"name": "slow", "do": "hang", "pids": str(folder / "pids")}]
with Steps(quiet=True) as steps:
    run_jobs("busy_child", jobs, folder / "run", steps, environments=[{}, {}], limit_seconds=600)
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(tmp_path, ending):
    (tmp_path / "busy_child.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=environment, stderr=subprocess.DEVNULL)
    pids = tmp_path / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    parent.send_signal(ending)
    parent.wait(20)
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: gone(pid))
