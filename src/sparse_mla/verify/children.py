"""Child processes for what may crash, hang or be interrupted: own session, time limit, no orphans.

A child reads jobs from its stdin, one JSON line each, and writes a result file for each, so that its output may hold
anything. When its stdin ends, its parent is gone, and it leaves.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NotCheckableError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from .progress import Steps

_POLL_SECONDS = 0.1
_TERM_SECONDS = 3.0
_LOG_TAIL = 20_000


class _Running(NamedTuple):
    """A job that a child is at."""

    number: int
    name: str
    began: float


class _Child:
    """One child process and the job that it is at."""

    def __init__(self, module: str, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (this interpreter, our module)
                [sys.executable, "-m", module, str(folder)],
                env=os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.running: _Running | None = None

    def start(self, number: int, job: Mapping[str, Any]) -> None:
        """Hand over a job."""
        self.running = _Running(number, str(job["name"]), time.monotonic())
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # a child that died says so in ``result``
                self._process.stdin.write(json.dumps({**job, "number": number}).encode() + b"\n")
                self._process.stdin.flush()

    def result(self, running: _Running, limit_seconds: float) -> dict[str, Any] | None:
        """The result of the job, or None while there is none yet.

        Raises:
            NotCheckableError: the child died, reported an error, or took longer than its limit.
        """
        file, dead = _result_file(self._folder, running.number), self._process.poll() is not None
        if not file.exists():
            if dead:
                raise NotCheckableError(f"{running.name}: the child process died", got=_last_line(self._folder / "log"))
            if time.monotonic() > running.began + limit_seconds:
                hint = "Use shorter --lengths, or an idle machine."
                raise NotCheckableError(f"{running.name}: no result", needs=f"{limit_seconds:.0f} s", hint=hint)
            return None
        result: dict[str, Any] = json.loads(file.read_bytes())
        if "error" in result:
            raise NotCheckableError(running.name, got=result["error"])
        return result

    def stop(self) -> None:
        """End the child and everything that it started."""
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, signal_number)
                self._process.wait(_TERM_SECONDS)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()


def run_jobs(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    steps: Steps,
    *,
    environments: Sequence[Mapping[str, str]],
    limit_seconds: float,
) -> list[dict[str, Any]]:
    """Run jobs in children, ``python -m module FOLDER``, and return their results in the order of the jobs.

    Args:
        jobs: JSON objects; each has a ``name`` for the progress display.
        folder: where each child gets a folder of its own; must not exist.
        environments: what is added to the environment of each child; as many children run side by side.
        limit_seconds: for each job.

    Raises:
        NotCheckableError: a child died, reported an error, or took longer than its limit.
    """
    waiting = list(enumerate(jobs))
    results: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        children = []
        for number, environment in enumerate(environments[: len(jobs)]):
            children.append(_Child(module, folder / str(number), environment))
            stack.callback(children[-1].stop)
        while len(results) < len(jobs):
            for child in children:
                if child.running is None and waiting:
                    child.start(*waiting.pop(0))
                if child.running is not None:
                    result = child.result(child.running, limit_seconds)
                    if result is not None:
                        results[child.running.number] = result
                        steps.done(child.running.name, time.monotonic() - child.running.began)
                        child.running = None
            time.sleep(_POLL_SECONDS)
    return [results[number] for number in range(len(jobs))]


def _result_file(folder: Path, number: int) -> Path:
    return folder / f"result-{number}.json"


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").splitlines()
    return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "no output")


def serve(run: Callable[[dict[str, Any]], dict[str, Any]], folder: Path) -> None:
    """The child's side: run jobs as they come, until the parent is gone.

    Args:
        run: a function of one job that returns a JSON object; what it raises becomes ``{"error": ...}``.
    """
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        try:
            result = run(job)
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            text = " ".join(str(error).split())
            result = {"error": f"{type(error).__name__}: {text[:600]}"}
        part = folder / "part.json"
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(_result_file(folder, job["number"]))


def _listen(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin.buffer:
        jobs.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)
