"""What the engine target concludes from answers and traces, without an engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparse_mla.dims import MLADims
from sparse_mla.errors import NotCheckableError
from sparse_mla.testing.faults import WRONG_SELECTIONS
from sparse_mla.testing.planted import recite
from sparse_mla.testing.tiny_model import tiny_config
from sparse_mla.verify.engine import CONTROLS
from sparse_mla.verify.engine_judgement import Comparison, Served, judge
from sparse_mla.verify.engine_trace import STAGES, EngineTrace, load

DIMS = MLADims.from_config(tiny_config())
LENGTH = 200
PLAN = {"device": "cpu", "scratch_bytes": 1, "stages": {"select": {"backend": "eager", "mode": "strict"}}}
LOGPROBS = [-1.0 - index / 1000 for index in range(LENGTH - 1)]


def trace(chunk, **changed):
    rows = {(stage, "layers.0"): {position: f"{position:064x}" for position in range(LENGTH + 7)} for stage in STAGES}
    for stage, position in changed.items():
        rows[stage, "layers.0"][position] = "f" * 64
    return EngineTrace(rows=rows, starts=(*range(0, LENGTH, chunk), *range(LENGTH, LENGTH + 7)))


def served(chunk, *, tokens=(5, 6), logprobs=LOGPROBS, traced=None):
    answer = {"tokens": list(tokens), "logprobs": list(logprobs), "plan": PLAN}
    return Served(length=LENGTH, chunk=chunk, answer=answer, trace=traced or trace(chunk))


def comparison(keys="fp8", *, theirs=LOGPROBS, wrong="", moved=0.5):
    theirs = None if theirs is None else {"logprobs": list(theirs), "near_ties": 0, "wrong": wrong}
    control = {"logprobs": [value - moved for value in LOGPROBS]}
    return Comparison(
        keys=keys, answer={"logprobs": LOGPROBS}, theirs=theirs, controls=dict.fromkeys(CONTROLS, control)
    )


def report(runs=None, comparisons=None):
    runs = [served(64), served(50)] if runs is None else runs
    comparisons = [comparison(), comparison("plain")] if comparisons is None else comparisons
    facts = {"engine": {}, "dtype": "float32"}
    return judge(DIMS, runs, comparisons, facts, seconds=lambda: 1.0)


RECITAL = recite(LENGTH, 4)
KNOWN = {"tokens": [*RECITAL.answer, 9, 9], "ranks": [1] * (LENGTH - 1), "logprobs": LOGPROBS, "plan": PLAN}
FORGOTTEN = KNOWN | {"tokens": [9] * 8, "ranks": [2] * (LENGTH - 1), "logprobs": [-9.0] * (LENGTH - 1)}


def recited(answer=KNOWN, wrong=FORGOTTEN):
    runs = [
        Served(length=LENGTH, chunk=chunk, answer=KNOWN | answer, trace=trace(chunk), recital=RECITAL)
        for chunk in (64, 50)
    ]
    both = replace(comparison(), answer=KNOWN, controls=dict.fromkeys(CONTROLS, wrong), recital=RECITAL)
    return report(runs, [both])


def failed(result):
    return {check.id for check in result.checks if not check.ok}


def test_agreement_is_verified_and_said():
    result = report()
    assert result.exit_code == 0
    assert any("in 4, 4 chunks" in line and "in every bit" in line for line in result.proved)
    assert result.to_json()["facts"]["controls"] == dict.fromkeys(CONTROLS, pytest.approx(0.5))
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.parametrize(("stage", "verb"), STAGES.items())
def test_another_row_in_one_plan_is_named(stage, verb):
    result = report([served(64), served(50, traced=trace(50, **{stage: 123}))])
    assert failed(result) == {f"engine.{verb}.plans"}
    (check,) = (check for check in result.checks if not check.ok)
    assert check.detail == "chunks of 64 and chunks of 50: layers.0, token 123"
    hashes = [plan["sha256"] for plan in result.cases[0]["plans"]]
    assert {name for name in hashes[0] if hashes[0][name] != hashes[1][name]} == {stage}


def test_planted_facts_come_back_and_wrong_selections_lose_them():
    result = recited()
    assert failed(result) == set()
    assert "200 tokens: all 4 planted facts come back, from the first token of the prompt on" in result.proved
    assert (
        "200 tokens: wrong selections lose facts; of 4 come back: last-k 0, first-k 0, shifted-by-one 0"
        in result.proved
    )
    recall = result.to_json()["facts"]["recall"]
    assert recall["200 tokens, chunks of 64"] == 1
    assert all(recall[f"200 tokens, {name}"] == 0 for name in CONTROLS)


def expected_second(span):
    return {"ranks": [2 if at == span[-1] - 1 else 1 for at in range(LENGTH - 1)]}


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ({"tokens": [*RECITAL.answer[:-1], 9, 9, 9]}, 1),
        (expected_second(RECITAL.spans[0]), 2),
        (expected_second(RECITAL.spans[2]), 4),
    ],
)
def test_one_wrong_token_of_a_planted_fact_is_a_fault(answer, lost):
    result = recited(answer)
    assert failed(result) == {"engine.recall.plans"}
    (check,) = (check for check in result.checks if not check.ok)
    assert check.detail == f"chunks of 64: 3 of 4 facts, without those numbered {lost}"
    assert "recall" not in " ".join(result.proved)


def test_a_wrong_selection_that_keeps_the_facts_proves_nothing():
    result = recited(wrong=KNOWN | {"logprobs": [-9.0] * (LENGTH - 1)})
    assert failed(result) == {f"engine.control.{name}" for name in CONTROLS}


def test_a_model_that_knows_no_facts_is_not_asked_for_them():
    assert report().to_json()["facts"]["recall"] == {}


def test_other_tokens_are_a_fault():
    assert failed(report([served(64), served(50, tokens=(5, 7))])) == {"engine.tokens.plans"}


@pytest.mark.parametrize(("apart", "agreement"), [(0.0, "in every bit"), (5e-5, "within 0.0001 (up to 5e-05 apart)")])
def test_logprobs_may_differ_by_the_tolerance_and_the_report_says_by_how_much(apart, agreement):
    near = [*LOGPROBS[:-1], LOGPROBS[-1] - apart]
    result = report([served(64), served(50, logprobs=near)])
    assert result.ok
    assert any(agreement in line for line in result.proved)


@pytest.mark.parametrize("value", [-9.0, float("nan")])
def test_logprobs_beyond_the_tolerance_are_a_fault(value):
    result = report([served(64), served(50, logprobs=[value, *LOGPROBS[1:]])])
    assert failed(result) == {"engine.logprobs.plans"}


def test_a_prompt_that_was_not_chunked_proves_nothing():
    assert failed(report([served(64), served(50, traced=trace(LENGTH))])) == {"engine.chunks"}


def test_a_prompt_below_index_topk_proves_nothing():
    dims = MLADims.from_config(tiny_config(index_topk=LENGTH))
    result = judge(dims, [served(64)], [comparison()], {"dtype": "float32"}, seconds=lambda: 1.0)
    assert failed(result) == {"engine.sparse"}


def test_transformers_must_agree():
    off = [value + 2e-4 for value in LOGPROBS]
    assert failed(report(comparisons=[comparison(theirs=off)])) == {"engine.logprobs.transformers"}
    assert failed(report(comparisons=[comparison(wrong="layer 0: row 3")])) == {"engine.select.reference"}


@pytest.mark.parametrize("moved", [0.0, 0.009, float("nan")])
def test_a_control_that_nobody_would_notice_is_a_fault(moved):
    result = report(comparisons=[comparison(moved=moved)])
    assert failed(result) == {f"engine.control.{name}" for name in CONTROLS}
    json.dumps(result.to_json(), allow_nan=False)


def test_without_transformers_the_report_says_so():
    result = report(comparisons=[comparison(theirs=None), comparison("plain", theirs=None)])
    assert result.ok
    assert result.not_checked == ("Transformers (not installed: pip install transformers)",)


def test_the_controls_are_the_shipped_wrong_selections():
    assert tuple(fault.name for fault in WRONG_SELECTIONS) == CONTROLS


def test_a_trace_is_read_whatever_the_order_of_its_lines(tmp_path):
    entries = [
        {
            "request": 0,
            "layer": layer,
            "stage": stage,
            "first": first,
            "digests": [f"{first + row:064x}" for row in (0, 1)],
        }
        for layer in ("a", "b")
        for stage in STAGES
        for first in (0, 2)
    ]
    folders = (tmp_path / "one", tmp_path / "two")
    for folder, lines in zip(folders, (entries, entries[::-1]), strict=True):
        folder.mkdir()
        (folder / "7.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = map(load, folders)
    assert one == two
    assert one.starts == (0, 2)
    assert {one.sha256(stage) for stage in STAGES} == {two.sha256("output")}
    assert one.first_difference(two, "output") == ""


def test_no_trace_means_that_others_served(tmp_path):
    with pytest.raises(NotCheckableError, match="SPARSE_MLA_VLLM"):
        load(tmp_path)
