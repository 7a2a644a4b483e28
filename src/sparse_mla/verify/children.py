"""Child processes for what may crash, hang or be interrupted: own session, time limit, no orphans.

A child gets a job file and writes one result file for each job, so that its output may hold anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import NotCheckableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .progress import Steps

_POLL_SECONDS = 0.1
_TERM_SECONDS = 3.0
_LOG_TAIL = 20_000


def result_file(folder: Path, number: int) -> Path:
    """Where a child leaves the result of job ``number``."""
    return folder / f"result-{number}.json"


def run_jobs(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    steps: Steps,
    *,
    environment: Mapping[str, str],
    limit_seconds: float,
) -> list[dict[str, Any]]:
    """Run ``python -m module FOLDER`` on the jobs and return their results in order.

    Args:
        jobs: JSON values; each has a ``name`` for the progress display.
        folder: an empty folder for the job file, the results and the child's log.
        limit_seconds: for each job.

    Raises:
        NotCheckableError: the child died, reported an error, or took longer than its limit.
    """
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(list(jobs)), encoding="utf-8")
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 (this interpreter, our module)
            [sys.executable, "-m", module, str(folder)],
            env=os.environ | dict(environment),
            stdin=subprocess.PIPE,  # its end tells the child that this process is gone
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return [_result(child, folder, number, job, steps, limit_seconds) for number, job in enumerate(jobs)]
        finally:
            _stop(child)


def _result(
    child: subprocess.Popen[bytes],
    folder: Path,
    number: int,
    job: Mapping[str, Any],
    steps: Steps,
    limit_seconds: float,
) -> dict[str, Any]:
    file, ends = result_file(folder, number), time.monotonic() + limit_seconds
    with steps.step(str(job["name"])):
        while not file.exists():
            if child.poll() is not None and not file.exists():
                raise NotCheckableError(f"{job['name']}: the child process died", got=_last_line(folder / "log"))
            if time.monotonic() > ends:
                hint = "Use shorter --lengths, or an idle machine."
                raise NotCheckableError(f"{job['name']}: no result", needs=f"{limit_seconds:.0f} s", hint=hint)
            time.sleep(_POLL_SECONDS)
    result: dict[str, Any] = json.loads(file.read_bytes())
    if "error" in result:
        raise NotCheckableError(f"{job['name']}", got=result["error"])
    return result


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").splitlines()
    return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "no output")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the child and everything that it started."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, signal_number)
            child.wait(_TERM_SECONDS)
    if child.stdin is not None:
        child.stdin.close()
    child.wait()


def serve(run: Any, folder: Path) -> None:
    """The child's side: run each job of the file, and leave when the parent is gone.

    Args:
        run: a function of one job that returns a JSON object; what it raises becomes ``{"error": ...}``.
    """
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for number, job in enumerate(json.loads((folder / "jobs.json").read_bytes())):
        try:
            result = run(job)
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            text = " ".join(str(error).split())
            result = {"error": f"{type(error).__name__}: {text[:600]}"}
        part = folder / f"part-{number}.json"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(result_file(folder, number))


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
