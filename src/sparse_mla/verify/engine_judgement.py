"""From the answers of an engine and of Transformers to checks and a report."""

from __future__ import annotations

import hashlib
import statistics
import struct
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from .engine_trace import STAGES
from .report import Check, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..dims import MLADims
    from ..testing.planted import Recital
    from .engine_trace import EngineTrace

TOLERANCE = 1e-4
"""Of a logprob, between engines and where an engine's other layers are not stable to the bit."""
CONTROL_FACTOR = 100
"""By how many tolerances a wrong selection must move the median logprob, or the comparison would prove nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One prompt under one chunk plan; ``answer``: tokens, logprobs and ranks of the prompt from its second token on, plan.

    ``recital`` is the prompt where it holds planted facts and the model is one that repeats them.
    """

    length: int
    chunk: int
    answer: Mapping[str, Any]
    trace: EngineTrace
    recital: Recital | None = None

    @property
    def name(self) -> str:
        """What reports call the plan."""
        return f"chunks of {self.chunk:,}"

    @property
    def chunks(self) -> int:
        """Engine steps that took part of the prompt."""
        return sum(start < self.length for start in self.trace.starts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One prompt with one kind of index keys: the engine, Transformers (None: not installed), and wrong selections."""

    keys: str
    answer: Mapping[str, Any]
    theirs: Mapping[str, Any] | None
    controls: Mapping[str, Mapping[str, Any]]
    recital: Recital | None = None

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.answer["logprobs"]) + 1


def judge(
    dims: MLADims,
    served: Sequence[Served],
    comparisons: Sequence[Comparison],
    facts: Mapping[str, Any],
    *,
    seconds: Callable[[], float],
) -> Report:
    """The report of an engine run."""
    groups = [[run for run in served if run.length == length] for length in dict.fromkeys(run.length for run in served)]
    checks = [check for group in groups for check in plan_checks(group, dims)]
    checks += [check for comparison in comparisons for check in _comparison_checks(comparison)]
    plan = served[0].answer["plan"]
    moved = {
        name: _median_move(comparison, wrong)
        for comparison in comparisons
        for name, wrong in comparison.controls.items()
    }
    return Report(
        target="engine",
        facts={
            **facts,
            "device": {"arch": plan["device"]},
            "index_topk": dims.index_topk,
            "stages": plan["stages"],
            "scratch": {"planned_bytes": plan["scratch_bytes"]},
            "logprobs": {str(group[0].length): f"equal {_agreement(group)}" for group in groups},
            "tolerance": TOLERANCE,
            "controls": {name: amount if isfinite(amount) else None for name, amount in moved.items()},
            "recall": _recall(served, comparisons),
            "compared_tokens": comparisons[0].tokens,
            "near_ties": {item.keys: item.theirs["near_ties"] for item in comparisons if item.theirs is not None},
        },
        cases=tuple(_case(group) for group in groups),
        checks=tuple(checks),
        proved=tuple(_proved(groups, comparisons, checks)),
        not_proved=tuple(_not_proved(groups, comparisons, facts)),
        seconds=seconds(),
        not_checked=() if comparisons[0].theirs else ("Transformers (not installed: pip install transformers)",),
    )


def told_again(recital: Recital, answer: Mapping[str, Any]) -> list[bool]:
    """For each fact whether the model knew it: it says the first one itself, and of the others expects every token most."""
    first = tuple(answer["tokens"][: len(recital.answer)]) == recital.answer
    return [first, *(all(answer["ranks"][at - 1] == 1 for at in span) for span in recital.spans)]


def _recall(served: Sequence[Served], comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Share of planted facts that came back in every plan, by length, and with each wrong selection."""
    found = {
        f"{run.length} tokens, {run.name}": told_again(run.recital, run.answer) for run in served if run.recital
    } | {
        f"{item.tokens} tokens, {name}": told_again(item.recital, wrong)
        for item in comparisons
        if item.recital
        for name, wrong in item.controls.items()
    }
    return {case: round(sum(known) / len(known), 3) for case, known in found.items()}


def _agreement(group: Sequence[Served]) -> str:
    """How closely the logprobs agree over the plans.

    Operator hashes are demanded equal, so what is left comes from layers that are none of ours: on a CPU in fp32, matrix
    products change bits with the number of rows, below 16 of them almost always.
    """
    first = group[0].answer["logprobs"]
    pairs = [(a, b) for run in group[1:] for a, b in zip(first, run.answer["logprobs"], strict=True)]
    if all(a == b for a, b in pairs):
        return "in every bit"
    return f"within {TOLERANCE:g} (up to {max(abs(a - b) for a, b in pairs):.2g} apart)"


def plan_checks(group: Sequence[Served], dims: MLADims) -> Iterator[Check]:
    """The same prompt under every chunk plan."""
    first, case = group[0], f"{group[0].length:,} tokens"

    def check(identity: str, what: str, found: Iterator[str]) -> Check:
        detail = next(filter(None, found), "")
        return Check(id=f"engine.{identity}", case=case, what=what, ok=not detail, detail=detail)

    yield check("chunks", "the prompt was cut as asked", (_chunk_fault(run) for run in group))
    beyond = "" if first.length > dims.index_topk else f"index_topk is {dims.index_topk}"
    yield check("sparse", "the sparse path was taken: more tokens than index_topk", iter([beyond]))
    for stage, verb in STAGES.items():
        differs = (
            f"{first.name} and {run.name}: {place}" if (place := run.trace.first_difference(first.trace, stage)) else ""
            for run in group[1:]
        )
        yield check(f"{verb}.plans", f"{stage} of every layer: equal over {len(group)} plans", differs)
    tokens = (
        f"{first.name}: {first.answer['tokens']}, {run.name}: {run.answer['tokens']}"
        if run.answer["tokens"] != first.answer["tokens"]
        else ""
        for run in group[1:]
    )
    yield check("tokens.plans", "decoded tokens: equal", tokens)
    if first.recital:
        lost = (_lost(run.recital, run.answer, run.name) for run in group if run.recital)
        what = f"planted facts: all {len(first.recital.spans) + 1} come back, the first after {first.length:,} tokens"
        yield check("recall.plans", what, lost)
    logprobs = (_logprob_fault(first.answer, run.answer, f"{first.name} and {run.name}") for run in group[1:])
    yield check("logprobs.plans", f"prompt logprobs: equal {_agreement(group)}", logprobs)


def _chunk_fault(run: Served) -> str:
    wanted = -(-run.length // run.chunk)
    return "" if run.chunks == wanted else f"{run.name}: {run.chunks} chunks, wanted {wanted}"


def _lost(recital: Recital, answer: Mapping[str, Any], who: str) -> str:
    known = told_again(recital, answer)
    numbers = ", ".join(str(number) for number, found in enumerate(known, 1) if not found)
    return "" if all(known) else f"{who}: {sum(known)} of {len(known)} facts, without those numbered {numbers}"


def _logprob_fault(mine: Mapping[str, Any], theirs: Mapping[str, Any], who: str) -> str:
    """Where two lists of logprobs differ most, if that is more than the tolerance; NaN is never within it."""
    pairs = list(zip(mine["logprobs"], theirs["logprobs"], strict=True))
    wrong = [(index, abs(a - b)) for index, (a, b) in enumerate(pairs, 1) if not abs(a - b) <= TOLERANCE]
    if not wrong:
        return ""
    index, most = max(wrong, key=lambda item: item[1])
    return (
        f"{who}: {len(wrong)} of {len(pairs)} differ, first at token {wrong[0][0]}, most by {most:.3g} at token {index}"
    )


def _comparison_checks(comparison: Comparison) -> Iterator[Check]:
    case = f"{comparison.tokens:,} tokens, {comparison.keys} index keys"
    theirs = comparison.theirs
    if theirs is not None:
        judge_name = "the float64 reference on the cache's bytes" if comparison.keys == "fp8" else "a stable top-k"
        what = f"selected indices of every row and layer: {judge_name} in Transformers"
        yield Check(id="engine.select.reference", case=case, what=what, ok=not theirs["wrong"], detail=theirs["wrong"])
        detail = _logprob_fault(comparison.answer, theirs, "engine and Transformers")
        what = f"every prompt logprob: within {TOLERANCE:g} of Transformers"
        yield Check(id="engine.logprobs.transformers", case=case, what=what, ok=not detail, detail=detail)
    for name, wrong in comparison.controls.items():
        moved = _median_move(comparison, wrong)
        ok = moved >= CONTROL_FACTOR * TOLERANCE
        what = f"control {name}: a wrong selection moves the median logprob by {CONTROL_FACTOR} tolerances"
        detail = "" if ok else f"it moved by {moved:.3g}, needs {CONTROL_FACTOR * TOLERANCE:g}"
        yield Check(id=f"engine.control.{name}", case=case, what=what, ok=ok, detail=detail)
        if comparison.recital:
            known = told_again(comparison.recital, wrong)
            what = f"control {name}: a wrong selection loses most planted facts"
            detail = "" if 2 * sum(known) < len(known) else f"{sum(known)} of {len(known)} come back"
            yield Check(id=f"engine.control.{name}", case=case, what=what, ok=not detail, detail=detail)


def _median_move(comparison: Comparison, wrong: Mapping[str, Any]) -> float:
    pairs = zip(comparison.answer["logprobs"], wrong["logprobs"], strict=True)
    return float(statistics.median(abs(right - other) for right, other in pairs))


def _case(group: Sequence[Served]) -> dict[str, Any]:
    return {
        "case": f"{group[0].length:,} tokens",
        "tokens": group[0].length + len(group[0].answer["tokens"]),
        "stages": {**STAGES, "tokens": "engine", "logprobs": "engine"},
        "plans": [
            {
                "name": run.name,
                "calls": run.chunks,
                "sha256": {stage: run.trace.sha256(stage) for stage in STAGES}
                | {name: _numbers_sha256(run.answer[name]) for name in ("tokens", "logprobs")},
            }
            for run in group
        ],
    }


def _numbers_sha256(numbers: Sequence[float]) -> str:
    """SHA-256 over the numbers as little-endian float64, which holds token ids and fp32 logprobs exactly."""
    return hashlib.sha256(struct.pack(f"<{len(numbers)}d", *numbers)).hexdigest()


def _proved(
    groups: Sequence[Sequence[Served]], comparisons: Sequence[Comparison], checks: Sequence[Check]
) -> Iterator[str]:
    if not all(check.ok for check in checks):
        return
    for group in groups:
        counts = ", ".join(str(run.chunks) for run in group)
        yield (
            f"{group[0].length:,} tokens in {counts} chunks: the same tokens, operator hashes of every layer equal, "
            f"prompt logprobs equal {_agreement(group)}"
        )
        if group[0].recital:
            facts = len(group[0].recital.spans) + 1
            yield (
                f"{group[0].length:,} tokens: all {facts} planted facts come back, from the first token of the prompt on"
            )
    for item in comparisons:
        if item.recital and item.controls:
            kept = ", ".join(f"{name} {sum(told_again(item.recital, wrong))}" for name, wrong in item.controls.items())
            yield f"{item.tokens:,} tokens: wrong selections lose facts; of {len(item.recital.spans) + 1} come back: {kept}"
        if item.theirs is not None:
            ties = (
                f" ({item.theirs['near_ties']} rows with two scores within rounding)"
                if item.theirs["near_ties"]
                else ""
            )
            yield f"{item.tokens:,} tokens, {item.keys} index keys: Transformers agrees on every prompt logprob{ties}"


def _not_proved(
    groups: Sequence[Sequence[Served]], comparisons: Sequence[Comparison], facts: Mapping[str, Any]
) -> Iterator[str]:
    compared, longest = comparisons[0].tokens, max(group[0].length for group in groups)
    if compared < longest:
        yield f"agreement with Transformers beyond {compared:,} tokens, and of decoded tokens"
    yield f"other dtypes than {facts['dtype']}, compiled mode, prefix caching, more than one rank"
