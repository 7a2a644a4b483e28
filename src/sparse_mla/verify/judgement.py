"""From the runs of a case to checks: equal over plans, equal to the reference, and nothing written where it must not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .report import Check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .case import Case, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """A judged case: its checks, and its facts as JSON values."""

    facts: Mapping[str, Any]
    checks: tuple[Check, ...]


def judge(
    name: str,
    case: Case,
    runs: Sequence[Run],
    writes: Mapping[str, Mapping[str, str]],
    verdicts: Mapping[str, Mapping[str, str]],
    *,
    scratch_bytes: int,
    seconds: float,
) -> CaseResult:
    """All checks of a case.

    Args:
        writes: for each plan and cache, where the bytes differ from the reference's encoding; empty where they do not.
        verdicts: for each stage of select and attend and each plan that is wrong there, the first difference.
        scratch_bytes: what the plan promised.
    """
    checks = []
    for stage, verb in case.stages.items():
        ok, detail = _equal(stage, verb, runs)
        what = f"{stage}: equal over {len(runs)} plans"
        checks.append(Check(id=f"operators.{verb}.plans", case=name, what=what, ok=ok, detail=detail))
        wrong = verdicts.get(stage) if verb != "write" else {plan: found[stage] for plan, found in writes.items()}
        first = next(((plan, where) for plan, where in (wrong or {}).items() if where), None)
        detail = "" if first is None else f'plan "{first[0]}": {first[1]}'
        what = f"{stage}: equal to the reference"
        checks.append(Check(id=f"operators.{verb}.reference", case=name, what=what, ok=not detail, detail=detail))
    checks += _side_checks(name, runs, scratch_bytes)
    return CaseResult(facts=_facts(name, case, runs, seconds), checks=tuple(checks))


def _equal(stage: str, verb: str, runs: Sequence[Run]) -> tuple[bool, str]:
    first = runs[0]
    for run in runs[1:]:
        if run.stages[stage].sha256 == first.stages[stage].sha256:
            continue
        token = run.stages[stage].first_difference(first.stages[stage])
        unit = "cache rows from token" if verb == "write" else "token"
        where = "" if token is None else f" first at {unit} {token} ({run.plan.locate(token)})"
        return False, f'plans "{first.plan.name}" and "{run.plan.name}" differ{where}'
    return True, ""


def _side_checks(name: str, runs: Sequence[Run], scratch_bytes: int) -> Iterator[Check]:
    """What a wrong kernel does besides being wrong; each with the first plan that shows it."""
    excess = [max(0, run.touched_bytes - scratch_bytes) for run in runs]
    for identity, what, amounts in (
        ("write.strays", "rows that no token owns keep their bytes", [", ".join(run.strays) for run in runs]),
        ("select.count", "each row selects index_topk tokens, or all that it sees", [run.short_rows for run in runs]),
        ("select.nan", "no row has only NaN scores", [run.nan_rows for run in runs]),
        ("plan.scratch", "scratch within what the plan promised (bytes)", excess),
    ):
        wrong = next(((run.plan.name, amount) for run, amount in zip(runs, amounts, strict=True) if amount), None)
        detail = "" if wrong is None else f'plan "{wrong[0]}": {wrong[1]}'
        yield Check(id=f"operators.{identity}", case=name, what=what, ok=not detail, detail=detail)


def _facts(name: str, case: Case, runs: Sequence[Run], seconds: float) -> dict[str, Any]:
    rows = case.rows
    return {
        "case": name,
        "tokens": case.total,
        "rows": {
            "query": len(rows.query),
            "reference": len(rows.reference),
            "complete": rows.complete,
            "page_boundaries": list(rows.pages),
        },
        "stages": dict(case.stages),
        "plans": [
            {
                "name": run.plan.name,
                "calls": len(run.plan.ends),
                "fresh_objects": run.plan.fresh,
                "beside_another_request": run.plan.beside,
                "sha256": {stage: trace.sha256 for stage, trace in run.stages.items()},
                "sparse_rows": run.sparse_rows,
                "nan_rows": run.nan_rows,
                "touched_scratch_bytes": run.touched_bytes,
            }
            for run in runs
        ],
        "seconds": round(seconds, 1),
    }
