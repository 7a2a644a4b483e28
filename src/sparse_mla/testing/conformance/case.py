"""A named case: one check of one clause on one variant, for any candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..geometries import CI

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..candidates import Candidate


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``run`` returns when the candidate keeps the clause.

    It raises ConformanceError where the clause is broken, and BackendRejectedError where the candidate's rows declare
    that they do not cover the case.
    """

    clause: str
    name: str
    tag: str
    run: Callable[[Candidate], None]

    def __str__(self) -> str:
        return f"{self.clause}-{self.name}"


def variants(clause: str, check: Callable[..., None], *each: tuple[object, ...], tag: str = CI) -> tuple[Case, ...]:
    """One case for each tuple of arguments after the candidate, named after the check and the arguments."""
    return tuple(
        Case(
            clause=clause,
            name="-".join([check.__name__.replace("_", "-"), *map(_label, arguments)]),
            tag=tag,
            run=partial(_call, check, arguments),
        )
        for arguments in each or ((),)
    )


def _call(check: Callable[..., None], arguments: tuple[object, ...], candidate: Candidate) -> None:
    check(candidate, *arguments)


def _label(argument: object) -> str:
    return getattr(argument, "__name__", str(argument)).replace("_", "-").strip("-")
