"""Plan: the backend of each stage and every byte of scratch, settled once, before anything runs. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import envs
from .backends.table import TABLE
from .problem import Stage
from .resolve import Resolution, installed_packages, resolve
from .workspace import BufferSpec, packed_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .backends.base import Row
    from .device import Device
    from .problem import Problem
    from .requirements import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """One stage: who runs it, in which mode, with which scratch."""

    row: Row
    mode: str
    buffers: tuple[BufferSpec, ...]
    resolution: Resolution

    @classmethod
    def of(cls, resolution: Resolution, problem: Problem, budget_bytes: int) -> StagePlan:
        """The chosen row with its scratch.

        Raises:
            BackendRejectedError: no row was chosen.
        """
        row, device = resolution.require(), resolution.device
        return cls(
            row=row,
            mode=row.mode(problem, device),
            buffers=row.scratch(problem, device, budget_bytes),
            resolution=resolution,
        )

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the stage's buffers, aligned."""
        return packed_bytes(self.buffers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Holds for every legal call of ``problem``: any rows up to max_num_tokens, any context up to max_model_len."""

    problem: Problem
    device: Device
    budget_bytes: int
    write: StagePlan
    select: StagePlan
    attend: StagePlan

    @property
    def stages(self) -> dict[Stage, StagePlan]:
        """The three stages by name."""
        return {Stage.WRITE: self.write, Stage.SELECT: self.select, Stage.ATTEND: self.attend}

    @property
    def scratch_bytes(self) -> int:
        """Stages run one after the other and nothing lives between them, so they share one arena."""
        return max(stage.scratch_bytes for stage in self.stages.values())

    def without(self, stage: Stage, reason: Reason) -> Plan:
        """The plan in which the next row of the table runs ``stage``, because the chosen one turned out not to run.

        Raises:
            BackendRejectedError: the backend was asked for by name, or no other row can; every reason is listed.
        """
        resolution = self.stages[stage].resolution.without(reason)
        return self._with(stage, StagePlan.of(resolution, self.problem, self.budget_bytes))

    def fast(self, stage: Stage) -> Plan:
        """The plan without the promise that decode and prefill of ``stage`` give the same bits."""
        return self._with(stage, replace(self.stages[stage], mode="fast"))

    def _with(self, stage: Stage, changed: StagePlan) -> Plan:
        stages = self.stages | {stage: changed}
        return replace(self, write=stages[Stage.WRITE], select=stages[Stage.SELECT], attend=stages[Stage.ATTEND])

    def describe(self) -> dict[str, object]:
        """Which backend runs each stage, in which mode, and the effective index_topk: part of every result."""
        stages = {
            str(stage): {"backend": item.row.name, "mode": item.mode, "scratch_bytes": item.scratch_bytes}
            for stage, item in self.stages.items()
        }
        return {
            "device": self.device.arch,
            "index_topk": self.problem.dims.index_topk,
            "scratch_bytes": self.scratch_bytes,
            "stages": stages,
        }


def make_plan(
    problem: Problem,
    device: Device,
    *,
    backend: str | None = None,
    budget_bytes: int | None = None,
    rows: Sequence[Row] = TABLE,
    assume_installed: bool = False,
) -> Plan:
    """Resolve every stage and state its scratch.

    Args:
        backend: a table name for all stages, or ``auto``; None reads SPARSE_MLA_BACKEND.
        budget_bytes: what a stage may use where it has a choice; None reads SPARSE_MLA_SCRATCH_MIB.
        rows: the table; tests pass their own.
        assume_installed: answer for another machine: optional packages count as present.

    Raises:
        BackendRejectedError: a stage that no row, or not the row asked for, can run.
        UsageError: an unknown backend name or a bad environment variable.
    """
    wanted = envs.get("SPARSE_MLA_BACKEND") if backend is None else backend
    budget = envs.get("SPARSE_MLA_SCRATCH_MIB") if budget_bytes is None else budget_bytes
    installed = None if assume_installed else installed_packages(rows)

    def settle(stage: Stage) -> StagePlan:
        resolution = resolve(stage, problem, device, backend=wanted, rows=rows, installed=installed)
        return StagePlan.of(resolution, problem, budget)

    return Plan(
        problem=problem,
        device=device,
        budget_bytes=budget,
        write=settle(Stage.WRITE),
        select=settle(Stage.SELECT),
        attend=settle(Stage.ATTEND),
    )
