"""Progress of a long run on stderr: a bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self


class Steps(AbstractContextManager["Steps"]):
    """Counts the steps of a run; ``quiet`` shows nothing. Use as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        bar = self._console.is_terminal and not quiet
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not bar)
        self._task = self._bar.add_task("", total=0)
        self._lines = not bar
        self._total = self._done = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def expect(self, count: int) -> None:
        """Announce ``count`` further steps."""
        self._total += count
        self._bar.update(self._task, total=self._total)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """One step, counted when it ends."""
        began = time.monotonic()
        self._bar.update(self._task, description=text)
        yield
        self.done(text, time.monotonic() - began)

    def say(self, text: str) -> None:
        """A line that stays: what a run that is cut short has found so far."""
        self._console.print(text, markup=False, soft_wrap=True)

    def done(self, text: str, seconds: float) -> None:
        """Count a step that ended."""
        self._done += 1
        self._bar.update(self._task, description=text)
        self._bar.advance(self._task)
        if self._lines:
            line = f"[{self._done}/{self._total}] {text}: {seconds:.1f} s"
            self._console.print(line, markup=False, soft_wrap=True)
