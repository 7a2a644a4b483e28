"""``verify --self-test``: known faults are put into the real operators and the engine, and each must be caught.

Each runs twice: on a prompt that fits into one pass of the operators, where nothing may be reported, and on a long one,
where the check meant for it must. Then many clean runs, drawn at random, must raise no alarm.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..testing.faults import KINDS
from ..testing.geometries import sizes
from .operators import OperatorOptions, Operators
from .progress import Steps
from .report import Check, Report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..testing.faults import Fault

CLEAN_RUNS = 200
SHORT = 44
LONG = 400
_BASE = OperatorOptions(
    lengths=(LONG,),
    chunk_tokens=(128, 96),
    dims=sizes(2, 2, 64),
    complete_up_to=LONG,
    pages=2,
    sampled=16,
    referenced=3,
)
_TWO_SEGMENTS = replace(
    _BASE, lengths=(600,), chunk_tokens=(256,), dims=sizes(6, 2, 640, rank=128), complete_up_to=0, sampled=32
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Where a fault has room to show.

    Attributes:
        kind: of inputs; see ``testing.inputs.Prompt``.
        needs: what the long run has and the short one lacks, in words.
    """

    needs: str
    kind: str = "integer"
    options: OperatorOptions = _BASE


SCENARIOS: Mapping[str, Scenario] = {
    "stale-gather": Scenario(needs="a second call after one of several passes"),
    "uninitialised-tail": Scenario(needs="a call of several passes and a rest"),
    "causal-limit-off-by-one": Scenario(needs="a call of several passes"),
    "tie-order-by-tile": Scenario(needs="ties, in a call of several passes", kind="tied"),
    "radix-bin-overflow": Scenario(needs="more near-equal scores than a bin holds", kind="tied"),
    "plan-under-too-small-a-key": Scenario(needs="three chunks of one size"),
    "absolute-for-relative": Scenario(needs="another request in front of a long call"),
    "evicted-prefix-block": Scenario(needs="full blocks that were given to other tokens"),
    "last-k": Scenario(needs="more tokens than index_topk"),
    "wrong-scale-granularity": Scenario(needs="a whole segment of selected rows, fp8 latents", kind="normal"),
    "slot-zero-for-minus-one": Scenario(
        needs="a second segment of indices, partly unused", kind="normal", options=_TWO_SEGMENTS
    ),
    "head-mapping-under-tp": Scenario(
        needs="a second segment of indices, six heads a rank", kind="normal", options=_TWO_SEGMENTS
    ),
    "scratch-aliasing-the-cache": Scenario(needs="requests longer than what was reserved for"),
    "wrong-fp8-encoding": Scenario(needs="a call of more than one write tile"),
    "saturating-rope-part": Scenario(needs="a call of more than one write tile, fp8 latents", kind="normal"),
    "32-bit-address-overflow": Scenario(
        needs="blocks beyond 2 GiB", options=replace(_BASE, block_stride=1 << 28, chunk_tokens=(128,))
    ),
}
"""By name of each fault of the operators."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caught:
    """What became of one fault.

    Attributes:
        short, long: the checks that failed on the prompt of one pass (none should), and on the long one.
    """

    fault: Fault
    needs: str
    short: Sequence[Check] = field(default=())
    long: Sequence[Check] = field(default=())

    @property
    def first(self) -> Check | None:
        """The first check that failed: checks come in the order in which a fault travels through the stages."""
        return next(iter(self.long), None)

    @property
    def in_place(self) -> bool:
        """Caught when long, in the stage where it arises."""
        return self.first is not None and self.first.id.split(".")[1] == self.fault.stage

    @property
    def ok(self) -> bool:
        """Clean when short, and caught in its place when long."""
        return not self.short and self.in_place

    def facts(self) -> dict[str, Any]:
        """As JSON values."""
        first = self.first
        return {
            "kind": self.fault.name,
            "what": self.fault.what,
            "level": self.fault.level,
            "needs": self.needs,
            "short": "clean" if not self.short else self.short[0].id,
            "caught_by": first.id if first else None,
            "first_stage": first.what.partition(":")[0].removesuffix(" of every layer") if first else None,
            "evidence": first.detail if first else None,
            "escapes_without": list(self.fault.nets),
        }

    def checks(self) -> Iterator[Check]:
        """Two for each fault."""
        alarm = "" if not self.short else f"{self.short[0].id}: {self.short[0].detail}"
        what = f"{self.fault.what}: nothing is reported on a prompt of one pass"
        yield Check(id="self-test.short", case=self.fault.name, what=what, ok=not alarm, detail=alarm)
        found = f"{self.first.id}, which is not where it arises" if self.first else "no check failed"
        what = f"{self.fault.what}: caught at stage {self.fault.stage}"
        yield Check(
            id="self-test.caught",
            case=self.fault.name,
            what=what,
            ok=self.in_place,
            detail="" if self.in_place else found,
        )


def failures(options: OperatorOptions, kind: str, steps: Steps) -> list[Check]:
    """The checks of one case of the operator target that fail, in their order."""
    operators = Operators(options)
    result = operators.case(options.lengths[0], kind, operators.lane(), steps)
    return [check for check in result.checks if not check.ok]


def operator_fault(fault: Fault, steps: Steps) -> Caught:
    """Put one fault into the operators and judge a short and a long prompt."""
    scenario = SCENARIOS[fault.name]
    short = replace(scenario.options, lengths=(SHORT,), chunk_tokens=(SHORT // 2, SHORT // 3))
    with fault.inject():
        alarms = failures(short, scenario.kind, steps)
    with fault.inject():
        found = failures(scenario.options, scenario.kind, steps)
    return Caught(fault=fault, needs=scenario.needs, short=alarms, long=found)


def clean_run(number: int, seed: int, steps: Steps) -> tuple[str, list[Check]]:
    """A run without a fault on drawn sizes: what was drawn, and the checks that fail all the same."""
    draw = random.Random(f"clean {seed} {number}")
    dims = sizes(
        draw.choice((1, 2, 3, 5, 8)),
        draw.choice((1, 2, 4, 6)),
        draw.choice((1, 7, 24, 64, 100)),
        index_dim=draw.choice((32, 64, 128)),
        rank=draw.choice((64, 80, 512)),
        rope=draw.choice((0, 16, 64)),
    )
    length = draw.choice((1, 2, draw.randint(3, 40), draw.randint(41, 250)))
    chunk_tokens = tuple(sorted({draw.randint(1, 130), draw.randint(1, 130)}))
    chunk_tokens = tuple(size for size in chunk_tokens if length // size < 12)
    options = OperatorOptions(
        lengths=(length,),
        chunk_tokens=chunk_tokens,
        dims=dims,
        seed=draw.randrange(1 << 20),
        complete_up_to=length if draw.random() < 0.3 else 0,
        pages=1,
        sampled=draw.randint(1, 24),
        referenced=draw.randint(1, 3),
    )
    kind = draw.choice(("normal", "integer", "tied"))
    words = f"{length} tokens, {kind}, chunks of {chunk_tokens}, seed {options.seed}, {dims}"
    return words, failures(options, kind, steps)


def self_test(
    steps: Steps,
    *,
    clean_runs: int,
    seed: int,
    engine: Callable[[Steps], tuple[Sequence[Caught], Sequence[Check]]] | None,
    not_checked: Sequence[str] = (),
) -> Report:
    """The report of the whole self-test.

    Args:
        engine: runs the faults of the engine; None where none is installed, which ``not_checked`` says.

    Raises:
        NotCheckableError: the engine's process failed.
    """
    began = time.monotonic()
    kinds = [fault for fault in KINDS if fault.level == "operator"]
    steps.expect(len(kinds) + 1)
    caught, unprovoked = [], []
    with Steps(quiet=True) as silent:
        for fault in kinds:
            with steps.step(f"self-test: {fault.name}"):
                caught.append(operator_fault(fault, silent))
        with steps.step(f"self-test: {clean_runs} clean runs"):
            for number in range(clean_runs):
                words, failed = clean_run(number, seed, silent)
                unprovoked += [f"{words}: {check.id}: {check.detail}" for check in failed]
    if engine is not None:
        more, alarms = engine(steps)
        caught += more
        unprovoked += [f"engine: {check.id}: {check.detail}" for check in alarms]
    what = f"{clean_runs} clean runs on drawn sizes: no alarm"
    detail = "; ".join(unprovoked[:3])
    clean = Check(id="self-test.clean", case="clean runs", what=what, ok=not unprovoked, detail=detail)
    return Report(
        target="self-test",
        facts={"clean_runs": clean_runs, "alarms": len(unprovoked), "seed": seed, "short_tokens": SHORT},
        cases=tuple(one.facts() for one in caught),
        checks=(*(check for one in caught for check in one.checks()), clean),
        proved=(
            f"{sum(one.ok for one in caught)} of {len(caught)} faults: unseen when short, caught where they arise",
        ),
        not_proved=("other kinds of fault than those of the table",),
        seconds=time.monotonic() - began,
        not_checked=tuple(not_checked),
    )
