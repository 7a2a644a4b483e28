"""Who is judged: a backend of the table by name, or rows from outside as ``package:object``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from ..attention import SparseMLA
from ..backends.base import Row
from ..backends.table import TABLE
from ..device import probe
from ..errors import BackendRejectedError, UsageError
from ..plan import make_plan
from ..problem import Problem, Stage
from ..resolve import AUTO, installed_packages, resolve
from ..workspace import Workspace

if TYPE_CHECKING:
    from ..plan import Plan

COMPANION = "eager"
"""Serves the stages that a candidate does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A backend under judgement.

    Attributes:
        own: the rows that are judged, by stage.
        rows: what plans are made from: its own rows, and the companion's for the stages that it does not serve, so an
            answer can come from nobody else.
        where: the torch device.
    """

    name: str
    own: tuple[Row, ...]
    rows: tuple[Row, ...]
    where: str = "cpu"

    @classmethod
    def of(cls, name: str, own: Sequence[Row], where: str = "cpu") -> Candidate:
        """Judge the rows ``own``, one a stage at most."""
        served = {row.stage for row in own}
        companions = tuple(row for row in TABLE if row.name == COMPANION and row.stage not in served)
        return cls(name=name, own=tuple(own), rows=(*own, *companions), where=where)

    def plan(self, problem: Problem) -> Plan:
        """A plan in which the candidate runs every stage that it serves.

        Raises:
            BackendRejectedError: the problem is outside what its rows declare.
        """
        return make_plan(problem, probe(self.where), backend=AUTO, rows=self.rows)

    def operator(self, problem: Problem, workspace: Workspace | None = None) -> SparseMLA:
        """The plan's verbs, warm; with scratch of its own unless given."""
        space = Workspace(self.where) if workspace is None else workspace
        operator = SparseMLA(self.plan(problem), space, self.where)
        operator.warm_up()
        return operator

    def __str__(self) -> str:
        return self.name


def from_table(name: str, where: str = "cpu") -> Candidate:
    """The rows of the table with that name.

    Raises:
        UsageError: there is none.
    """
    own = tuple(row for row in TABLE if row.name == name)
    if not own:
        raise UsageError("backend", needs=" or ".join(sorted({row.name for row in TABLE})), got=repr(name))
    return Candidate.of(name, own, where)


def from_outside(path: str, where: str = "cpu") -> Candidate:
    """``package.module:object``, where the object is a ``Row`` or a sequence of rows with at most one for each stage.

    Raises:
        UsageError: it cannot be imported, or is neither.
    """
    module, _, dotted = path.partition(":")
    try:
        found: object = import_module(module)
        for part in filter(None, dotted.split(".")):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"backend {path}", needs="an importable package:object", got=str(error)) from None
    rows = [found] if isinstance(found, Row) else list(found) if isinstance(found, Sequence) else []
    own = tuple(row for row in rows if isinstance(row, Row))
    if not own or len(own) != len(rows) or len({row.stage for row in own}) != len(own):
        needs = "a sparse_mla.backends.base.Row, or a sequence with at most one for each stage"
        raise UsageError(f"backend {path}", needs=needs, got=type(found).__name__)
    return Candidate.of(path, own, where)


def resolving(problem: Problem, where: str = "cpu") -> tuple[Candidate, ...]:
    """Every backend of the table that serves at least one stage of ``problem`` on this device."""
    device, installed = probe(where), installed_packages()
    names = dict.fromkeys(row.name for row in TABLE)
    able = {
        verdict.row
        for stage in Stage
        for verdict in resolve(stage, problem, device, installed=installed).verdicts
        if not verdict.reasons
    }
    candidates = {name: [row for row in TABLE if row.name == name and row in able] for name in names}
    return tuple(Candidate.of(name, rows, where) for name, rows in candidates.items() if rows)


def refusal(candidate: Candidate, problem: Problem) -> str:
    """Why the candidate's rows do not cover the problem, from what they declare; empty if they do."""
    try:
        candidate.plan(problem)
    except BackendRejectedError as error:
        return str(error).replace("\n ", "")
    return ""
