"""Progress by tokens on stderr, with the time left: a bar on a terminal, one line per probe elsewhere."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from .outcome import Outcome, Probe


class Progress:
    """Use as a context manager; ``quiet`` shows nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._lines = quiet or not self._console.is_terminal
        self._bar = Bar(*columns, console=self._console, transient=True, disable=self._lines)
        self._task = self._bar.add_task("", total=0)
        self._planned: set[str] = set()
        self._total = self._done = 0
        self._spent = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def expect(self, probe: Probe) -> None:
        """Count a probe as work to come."""
        if probe.key not in self._planned:
            self._planned.add(probe.key)
            self._total += probe.length
            self._bar.update(self._task, total=self._total)

    def skip(self, probe: Probe) -> None:
        """A probe whose answer is known: nothing to wait for."""
        if probe.key in self._planned:
            self._planned.discard(probe.key)
            self._total -= probe.length
            self._bar.update(self._task, total=self._total)

    @contextmanager
    def step(self, probe: Probe) -> Iterator[Callable[[Outcome], None]]:
        """One probe; call what is yielded with its outcome."""
        self.expect(probe)
        began = time.monotonic()
        self._bar.update(self._task, description=probe.title)
        outcomes: list[Outcome] = []
        yield outcomes.append
        self._spent += time.monotonic() - began
        self._done += probe.length
        self._bar.update(self._task, completed=self._done)
        self.say(f"{probe.title}: {_result(outcomes[0])}, {time.monotonic() - began:.1f} s{self._left()}")

    def _left(self) -> str:
        left = (self._total - self._done) * self._spent / self._done if self._done else 0.0
        return f", about {_span(left)} left" if self._lines and left >= 1 else ""


def _result(outcome: Outcome) -> str:
    if not outcome.answered:
        return f"no answer, {outcome.failure}: {outcome.detail}"
    extra = f" and {outcome.invented} that were never planted" if outcome.invented else ""
    return f"{outcome.recalled} of {len(outcome.facts)} facts{extra}"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
