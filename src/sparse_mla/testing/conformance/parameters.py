"""Cases × candidates as pytest parameters, from the options in ``plugin.py``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ...errors import UsageError
from ..candidates import Candidate, from_outside, from_table, resolving
from ..geometries import CI, FP8, PLAIN
from . import addressing, dense, empty, geometry, layout, memory, numerics, routes, rows, selection

if TYPE_CHECKING:
    from .case import Case

CASES: tuple[Case, ...] = tuple(
    case
    for module in (rows, selection, empty, geometry, layout, addressing, memory, routes, dense, numerics)
    for case in module.CASES
)
FUZZED = (PLAIN, FP8)


def candidates(config: pytest.Config) -> tuple[Candidate, ...]:
    """Who is judged, by the options.

    Raises:
        pytest.UsageError: a name or path that leads nowhere.
    """
    named, where = config.getoption("backend"), config.getoption("device")
    try:
        if not named:
            problem = PLAIN.problem(max_num_tokens=256, max_num_requests=8, max_model_len=256)
            return resolving(problem, where)
        return tuple(from_outside(name, where) if ":" in name else from_table(name, where) for name in named)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill ``candidate``, ``case`` and ``fuzzed`` of the suite's tests."""
    if "candidate" in metafunc.fixturenames:
        metafunc.parametrize("candidate", candidates(metafunc.config), ids=str)
    if "case" in metafunc.fixturenames:
        tags = metafunc.config.getoption("tags") or [CI]
        metafunc.parametrize("case", [case for case in CASES if case.tag in tags], ids=str)
    if "fuzzed" in metafunc.fixturenames:
        metafunc.parametrize("fuzzed", FUZZED, ids=str)


def pytest_report_header(config: pytest.Config) -> str:
    """Who is judged, and where."""
    judged = ", ".join(
        f"{candidate} ({' '.join(row.stage for row in candidate.own)})" for candidate in candidates(config)
    )
    return f"sparse-mla conformance: {judged or 'nobody'} on {config.getoption('device')}"
