"""The suite: every case for every candidate. A case that a candidate's rows decline is skipped with the reasons."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings

from ...errors import BackendRejectedError
from ..schedule import Scheduler, Script
from .traffic import scripts

if TYPE_CHECKING:
    from ..candidates import Candidate
    from ..geometries import Geometry
    from .case import Case

_EXAMPLES = 40
_judged: Counter[str] = Counter()


def test_clause(case: Case, candidate: Candidate) -> None:
    """One named case of one clause."""
    try:
        case.run(candidate)
    except BackendRejectedError as refusal:
        _judged[f"{candidate} declined"] += 1
        pytest.skip(str(refusal).replace("\n", " "))
    _judged[str(candidate)] += 1


def test_something_was_judged(candidate: Candidate) -> None:
    """A candidate that declines every case has proved nothing."""
    if _judged[f"{candidate} declined"]:
        assert _judged[str(candidate)], f"{candidate} declined all {_judged[f'{candidate} declined']} cases"  # noqa: S101


def test_scheduler(candidate: Candidate, fuzzed: Geometry, request: pytest.FixtureRequest) -> None:
    """Random traffic on shared blocks gives each prompt's one-shot bits (C1, C7)."""
    wanted, counts = request.config.getoption("fuzz_examples"), Counter[str]()

    @settings(
        max_examples=wanted or _EXAMPLES,
        derandomize=wanted is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scripts())
    def play(script: Script) -> None:
        counts["examples"] += 1
        counts.update(Scheduler(candidate=candidate, geometry=fuzzed, script=script).play())

    try:
        play()
    except BackendRejectedError as refusal:
        pytest.skip(str(refusal).replace("\n", " "))
    print(", ".join(f"{count} {name}" for name, count in counts.items()), "and 0 differences")
