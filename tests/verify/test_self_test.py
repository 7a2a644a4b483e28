"""``verify --self-test``: each fault is unseen when short, caught where it arises, and escapes without its checks."""

from __future__ import annotations

import importlib.util
import json
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest

from sparse_mla.cli import verify as command
from sparse_mla.cli.main import main
from sparse_mla.errors import NotCheckableError
from sparse_mla.testing.faults import FAULTS, KINDS, patched
from sparse_mla.testing.geometries import sizes
from sparse_mla.verify import engine, judgement, operators, self_test, self_test_engine
from sparse_mla.verify.progress import Steps
from sparse_mla.verify.report import Check

OPERATOR_KINDS = [fault for fault in KINDS if fault.level == "operator"]
STATED = {
    "stale-gather", "scratch-aliasing-the-cache", "uninitialised-tail", "causal-limit-off-by-one", "tie-order-by-tile",
    "radix-bin-overflow", "wrong-fp8-encoding", "wrong-scale-granularity", "plan-under-too-small-a-key", "last-k",
    "absolute-for-relative", "slot-zero-for-minus-one", "32-bit-address-overflow", "head-mapping-under-tp",
    "stale-shared-indices", "saturating-rope-part", "evicted-prefix-block",
}  # fmt: skip


def net(check: Check) -> str:
    return check.id.rsplit(".", 1)[1]


def judged_by(nets, arguments, named) -> list[Check]:
    """What fails when only some comparisons are made on the same runs."""
    name, case, runs, writes, verdicts = arguments
    sides = judgement._side_checks
    with ExitStack() as stack:
        if "plans" not in nets:
            stack.enter_context(patched(judgement, "_equal", lambda *_: (True, "")))
        stack.enter_context(
            patched(judgement, "_side_checks", lambda *args: [side for side in sides(*args) if net(side) in nets])
        )
        writes, verdicts = (writes, verdicts) if "reference" in nets else ({}, {})
        result = judgement.judge(name, case, runs, writes, verdicts, **named)
    return [check for check in result.checks if not check.ok]


@pytest.mark.parametrize("fault", OPERATOR_KINDS, ids=lambda fault: fault.name)
def test_a_fault_is_unseen_when_short_caught_when_long_and_escapes_without_its_checks(fault):
    last = []

    def keep(*arguments, **named):
        last[:] = [(arguments, named)]
        return judgement.judge(*arguments, **named)

    with Steps(quiet=True) as steps, patched(operators, "judge", keep):
        caught = self_test.operator_fault(fault, steps)
    assert caught.short == []
    assert caught.ok
    assert {net(check) for check in caught.long} == set(fault.nets)
    arguments, named = last[0]
    assert judged_by((), arguments, named) == []
    for one in fault.nets:
        assert judged_by((one,), arguments, named), f"{one} alone sees nothing"
    others = {"plans", "reference", "count", "nan", "strays", "scratch"} - set(fault.nets)
    assert judged_by(others, arguments, named) == []


def test_every_kind_is_there_with_its_scenario():
    names = [fault.name for fault in KINDS]
    assert set(names) >= STATED
    assert len(names) == len(set(names))
    assert set(self_test.SCENARIOS) == {fault.name for fault in OPERATOR_KINDS}
    assert {fault.name for fault in FAULTS} > set(names)


def test_the_plan_key_is_right_for_two_chunks():
    fault = next(fault for fault in KINDS if fault.name == "plan-under-too-small-a-key")
    with Steps(quiet=True) as steps:
        caught = self_test.operator_fault(fault, steps)
    assert "first at token 256 (call 3 of" in caught.first.detail


def test_heads_that_fill_a_tile_map_right():
    """Without tensor parallelism the same kernel is right: the fault needs a rank's odd number of heads."""
    scenario = self_test.SCENARIOS["head-mapping-under-tp"]
    options = replace(scenario.options, dims=sizes(4, 2, 640, rank=128))
    fault = next(fault for fault in KINDS if fault.name == "head-mapping-under-tp")
    with fault.inject(), Steps(quiet=True) as steps:
        assert self_test.failures(options, scenario.kind, steps) == []


def test_clean_runs_raise_no_alarm():
    with Steps(quiet=True) as steps:
        drawn = [self_test.clean_run(number, 1, steps) for number in range(12)]
    assert [words for words, failed in drawn if failed] == []
    assert len({words for words, _ in drawn}) == 12


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed")
def test_the_engines_faults_are_caught_in_a_real_engine():
    with Steps(quiet=True) as steps:
        caught, alarms = self_test_engine.engine_faults(steps)
    assert alarms == []
    assert [one.fault.name for one in caught] == [fault.name for fault in KINDS if fault.level == "engine"]
    assert [one.facts()["caught_by"] for one in caught] == ["engine.attend.plans", "engine.select.plans"]
    assert all(one.ok for one in caught)
    assert "layers.2." in caught[0].first.detail
    assert "layers.0." in caught[1].first.detail
    assert "token 224" in caught[1].first.detail  # the third of the chunks of 112
    assert {net(check) for one in caught for check in one.long} == {"plans"}


@pytest.fixture
def small(monkeypatch):
    """One fault, two clean runs, and an engine that answers at once."""
    fault = next(fault for fault in KINDS if fault.name == "last-k")
    found = self_test.Caught(
        fault=KINDS[-1], needs="", long=(Check(id="engine.select.plans", case="", what="", ok=False),)
    )
    monkeypatch.setattr(self_test, "KINDS", (fault,))
    monkeypatch.setattr(self_test, "CLEAN_RUNS", 2)
    monkeypatch.setattr(engine, "installed_engine", lambda _: None)
    monkeypatch.setattr(self_test_engine, "engine_faults", lambda _: ([found], []))
    return fault


def test_the_command_line_shows_a_table_and_json(small, capsys):
    assert main(["verify", "--self-test", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "self-test"
    assert [(case["kind"], case["short"], case["caught_by"]) for case in report["cases"]] == [
        ("last-k", "clean", "operators.select.reference"),
        ("step-under-too-small-a-key", "clean", "engine.select.plans"),
    ]
    assert report["facts"]["clean_runs"] == 2
    assert main(["verify", "--self-test"]) == 0
    out = capsys.readouterr().out
    assert "operators.select.reference" in out
    assert "clean runs: 2, alarms: 0" in out


def test_a_fault_that_escapes_and_an_alarm_on_a_clean_run_are_faults_of_verify(small, monkeypatch, capsys):
    monkeypatch.setattr(self_test, "KINDS", (replace(small, inject=nullcontext),))
    assert main(["verify", "--self-test"]) == 1
    out = capsys.readouterr().out
    assert "ESCAPED" in out
    assert "FAULT self-test.caught: last-k" in out
    with small.inject():
        alarms = [self_test.clean_run(number, 0, Steps(quiet=True))[1] for number in range(6)]
    assert any(alarms)
    monkeypatch.setattr(self_test, "clean_run", lambda *_: ("drawn", next(filter(None, alarms))))
    assert main(["verify", "--self-test"]) == 1
    assert "FAULT self-test.clean: clean runs" in capsys.readouterr().out


def test_without_an_engine_its_faults_are_not_checked(small, monkeypatch, capsys):
    def missing(_):
        raise NotCheckableError("vLLM is not installed")

    monkeypatch.setattr(engine, "installed_engine", missing)
    assert main(["verify", "--self-test"]) == 3
    assert "not checked: faults of the engine (vLLM is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--engine=vllm", "--model=tiny", "--lengths=100", "--backend=eager", "--all-rows"])
def test_other_options_are_refused_beside_it(option, capsys):
    assert main(["verify", "--self-test", option]) == 2
    assert "no --self-test beside it" in capsys.readouterr().err
    assert command.SUMMARY
