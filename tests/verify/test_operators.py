"""The operator target: green on eager, red for each known fault, and its report says what it is based on."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

from sparse_mla.backends.eager import attend, write
from sparse_mla.testing.faults import FAULTS, WRONG_SELECTIONS, patched
from sparse_mla.testing.geometries import GLM_TP4
from sparse_mla.verify.operators import OperatorOptions, quick, verify_operators
from sparse_mla.verify.progress import Steps

DIMS = replace(GLM_TP4.dims, num_heads=2, index_n_heads=4, index_topk=64)
SMALL = OperatorOptions(lengths=(700,), chunk_tokens=(256,), dims=DIMS, pages=2, sampled=24, referenced=4)


def verify(options: OperatorOptions = SMALL):
    with Steps(quiet=True) as steps:
        return verify_operators(options, steps)


@pytest.fixture(scope="module")
def report():
    return verify(replace(SMALL, lengths=(300, 1100), chunk_tokens=(128, 256)))


def test_eager_is_verified(report):
    assert report.ok
    assert report.exit_code == 0
    assert [case["case"] for case in report.cases] == [
        "300 tokens, integer",
        "300 tokens, tied",
        "300 tokens, normal",
        "1,100 tokens, normal",
    ]


def test_hashes_are_those_of_every_plan_and_stage(report):
    for case in report.cases:
        for plan in case["plans"]:
            assert plan["sha256"].keys() == case["stages"].keys()
            assert all(len(value) == 64 and int(value, 16) >= 0 for value in plan["sha256"].values())
        assert all(plan["sha256"] == case["plans"][0]["sha256"] for plan in case["plans"])
    hashes = [case["plans"][0]["sha256"]["indices"] for case in report.cases]
    assert len(set(hashes)) == len(hashes)


def test_the_report_says_what_was_and_was_not_proved(report):
    facts = report.to_json()["facts"]
    assert facts["index_topk"] == 64
    assert {item["backend"] for item in facts["stages"].values()} == {"eager"}
    assert 0 < facts["scratch"]["touched_bytes"] <= facts["scratch"]["planned_bytes"]
    assert facts["sparse_rows"] > 0
    assert facts["nan_rows"] == 0
    assert any("the sparse path" in line for line in report.proved)
    assert any("query rows other than" in line and "seed 0" in line for line in report.not_proved)


def test_below_index_topk_the_sparse_path_is_not_claimed():
    report = verify(replace(SMALL, lengths=(50,), chunk_tokens=(20,), exact_kinds=()))
    assert report.ok
    assert not any("the sparse path" in line for line in report.proved)
    assert any("the sparse path" in line for line in report.not_proved)


def test_all_rows_looks_at_all(report):
    complete = verify(replace(SMALL, lengths=(150,), chunk_tokens=(64,), complete_up_to=150, exact_kinds=()))
    assert complete.ok
    assert complete.cases[0]["rows"]["query"] == 154
    assert not any("query rows other than" in line for line in complete.not_proved)


@pytest.mark.parametrize("fault", WRONG_SELECTIONS, ids=lambda fault: fault.name)
def test_a_known_fault_turns_it_red(fault):
    with fault.inject():
        report = verify(replace(SMALL, exact_kinds=("tied",)))
    assert report.exit_code == 1
    first = next(check for check in report.checks if not check.ok)
    assert first.id.split(".")[1] == fault.stage
    findings = report.to_json()["findings"]
    assert findings
    assert all(finding["severity"] == "fault" and finding["fix"] for finding in findings)


def test_nothing_is_left_of_a_fault():
    for fault in (fault for fault in FAULTS if fault.level == "operator"):
        with fault.inject():
            pass
    assert verify(replace(SMALL, exact_kinds=())).ok


def test_a_fault_is_needed_in_each_stage_for_its_check():
    """Bytes and outputs that are wrong in every plan alike are for the reference to find."""
    quantize, merge = write.quantize, attend._merge

    def coarse(values, *rest):
        coded, scale = quantize(values, *rest)
        return coded, scale * 2

    def greedy(run, busy, part):
        merge(run, busy, part)
        run.mass[busy] *= 1.01

    for owner, name, wrong, stage in ((write, "quantize", coarse, "write"), (attend, "_merge", greedy, "attend")):
        with patched(owner, name, wrong):
            report = verify(replace(SMALL, exact_kinds=()))
        failed = {check.id for check in report.checks if not check.ok}
        assert failed == {f"operators.{stage}.reference"}


def test_writing_outside_the_request_is_noticed():
    index = write.Write.index

    def spilling(kernel, index_k, view, slots):
        index(kernel, index_k, view, slots)
        free = max(set(range(view.num_slots)) - set(slots.tolist()))
        view.field("scale")[free // view.block_size, free % view.block_size] = 1.0

    with patched(write.Write, "index", spilling):
        report = verify(replace(SMALL, exact_kinds=()))
    assert "operators.write.strays" in {check.id for check in report.checks if not check.ok}


def test_only_nan_scores_are_reported():
    def poisoned(values, *rest):
        coded, scale = write_quantize(values, *rest)
        return coded, torch.full_like(scale, torch.nan)

    write_quantize = write.quantize
    with patched(write, "quantize", poisoned):
        report = verify(replace(SMALL, exact_kinds=()))
    assert "operators.select.nan" in {check.id for check in report.checks if not check.ok}
    assert report.to_json()["facts"]["nan_rows"] > 0


def test_json_has_its_schema(report):
    document = report.to_json()
    assert document["schema"] == "sparse-mla/verify/1"
    assert document["ok"] is True
    assert document["findings"] == []
    assert document.keys() >= {"target", "version", "facts", "cases", "checks", "proved", "not_proved", "not_checked"}


def test_junit_has_a_case_for_each_check(report):
    root = ET.fromstring(report.to_junit())  # noqa: S314 (our own)
    assert len(root.findall(".//testcase")) == len(report.checks)
    assert root.get("failures") == "0"
    with WRONG_SELECTIONS[0].inject():
        red = verify(replace(SMALL, exact_kinds=("tied",)))
    root = ET.fromstring(red.to_junit())  # noqa: S314
    assert int(root.get("failures")) == len(root.findall(".//failure")) > 0


def test_quick_is_the_first_length_alone():
    assert quick(OperatorOptions()).lengths == (20_000,)
