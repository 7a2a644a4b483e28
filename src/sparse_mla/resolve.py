"""resolve: which backend runs a stage, and why each other one does not. Pure: facts in, verdicts out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .backends.table import TABLE
from .errors import BackendRejectedError, UsageError
from .requirements import Reason, check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .backends.base import Row
    from .device import Device
    from .problem import Problem, Stage

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """One table row's answer; no reasons means that it can run."""

    row: Row
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The answer for one stage: every verdict in table order, and the row that was chosen, if any."""

    stage: Stage
    requested: str
    device: Device
    verdicts: tuple[Verdict, ...]
    chosen: Row | None

    def without(self, reason: Reason) -> Resolution:
        """The answer once ``reason`` speaks against the chosen row, too."""
        verdicts = tuple(
            replace(verdict, reasons=(*verdict.reasons, reason)) if verdict.row is self.chosen else verdict
            for verdict in self.verdicts
        )
        return replace(self, verdicts=verdicts, chosen=_first(verdicts))

    def require(self) -> Row:
        """The chosen row.

        Raises:
            BackendRejectedError: none was; the message lists every reason.
        """
        if self.chosen is not None:
            return self.chosen
        who = "no backend can" if self.requested == AUTO else f'backend "{self.requested}" cannot'
        headline = f'{who} run stage "{self.stage}" on {self.device.arch}'
        reasons = [
            reason if self.requested != AUTO else f"{verdict.row.name}: {reason}"
            for verdict in self.verdicts
            for reason in verdict.reasons
        ]
        hint = 'Use backend="eager", or run `sparse-mla doctor` to see every backend\'s verdict.'
        raise BackendRejectedError(headline, reasons, hint)


def installed_packages(rows: Sequence[Row] = TABLE) -> frozenset[str]:
    """Which of the packages that the rows need can be found here, without importing any."""
    wanted = {package for row in rows for package in row.requires.packages}
    return frozenset(package for package in wanted if find_spec(package) is not None)


def resolve(
    stage: Stage,
    problem: Problem,
    device: Device,
    *,
    backend: str = AUTO,
    rows: Sequence[Row] = TABLE,
    installed: frozenset[str] | None = None,
) -> Resolution:
    """Walk the table in order; the first row without a reason wins.

    An explicit ``backend`` restricts the walk to its rows, so it never falls back.

    Args:
        installed: packages to take as importable; None takes all, for questions about machines that are not here.

    Raises:
        UsageError: no row of the stage has that name.
    """
    candidates = [row for row in rows if row.stage == stage and backend in (AUTO, row.name)]
    if not candidates:
        names = sorted({row.name for row in rows if row.stage == stage})
        raise UsageError(f"unknown backend for stage {stage}", needs=" or ".join([AUTO, *names]), got=repr(backend))
    verdicts = tuple(
        Verdict(
            row=row,
            reasons=check(
                row.requires, problem, device, frozenset(row.requires.packages) if installed is None else installed
            ),
        )
        for row in candidates
    )
    return Resolution(stage=stage, requested=backend, device=device, verdicts=verdicts, chosen=_first(verdicts))


def _first(verdicts: tuple[Verdict, ...]) -> Row | None:
    return next((verdict.row for verdict in verdicts if not verdict.reasons), None)
