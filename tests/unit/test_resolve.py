from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_mla.backends.table import TABLE
from sparse_mla.device import KNOWN, Device
from sparse_mla.errors import BackendRejectedError, UsageError
from sparse_mla.problem import Stage
from sparse_mla.requirements import Requires
from sparse_mla.resolve import installed_packages, resolve
from sparse_mla.testing.geometries import FP8, GLM_TP4, ODD

PROBLEM = FP8.problem(max_num_tokens=8, max_num_requests=2, max_model_len=100)
CPU = Device.named("cpu")
BASE = next(row for row in TABLE if row.name == "eager" and row.stage == Stage.ATTEND)


def row(name, **limits):
    return replace(BASE, name=name, requires=Requires(**limits))


FIRST, SECOND, LAST = row("first", archs=("sm90",), dtypes=("f16",)), row("second"), row("last")


def ask(rows, backend="auto", **rest):
    return resolve(Stage.ATTEND, PROBLEM, CPU, rows=rows, backend=backend, **rest)


def test_the_first_row_without_a_reason_wins_and_every_row_has_a_verdict():
    answer = ask((FIRST, SECOND, LAST))
    assert answer.chosen is SECOND
    assert [(verdict.row.name, len(verdict.reasons)) for verdict in answer.verdicts] == [
        ("first", 2),
        ("second", 0),
        ("last", 0),
    ]
    assert answer.require() is SECOND


def test_the_order_of_the_table_decides():
    assert ask((LAST, SECOND)).chosen is LAST


def test_an_explicit_name_never_falls_back():
    answer = ask((FIRST, SECOND), backend="first")
    assert answer.chosen is None
    with pytest.raises(BackendRejectedError) as caught:
        answer.require()
    said = str(caught.value).split("\n")
    assert said[0] == 'backend "first" cannot run stage "attend" on cpu:'
    assert said[1:3] == ["  device  needs sm90, got cpu", "  dtype  needs f16, got bf16"]
    assert 'Use backend="eager"' in said[3]


def test_no_backend_at_all_names_each_with_its_reasons():
    other = row("other", max_heads=1)
    with pytest.raises(BackendRejectedError) as caught:
        ask((FIRST, other)).require()
    said = str(caught.value)
    assert said.startswith('no backend can run stage "attend" on cpu:')
    assert "first: device  needs sm90, got cpu" in said
    assert "other: attention heads per rank  needs <= 1, got 4" in said


@pytest.mark.parametrize("name", ["", "eagre", "AUTO", "first "])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(UsageError, match=r"unknown backend for stage attend: needs auto or first or second, got"):
        ask((SECOND, FIRST), backend=name)


def test_rows_of_another_stage_do_not_count():
    select = replace(BASE, stage=Stage.SELECT, name="elsewhere")
    assert ask((select, SECOND)).chosen is SECOND
    with pytest.raises(UsageError):
        ask((select, SECOND), backend="elsewhere")


def test_two_rows_of_one_name_are_tried_in_order():
    narrow, wide = row("same", max_heads=1), row("same")
    assert ask((narrow, wide), backend="same").chosen is wide


def test_packages_count_only_where_it_is_asked_what_is_here():
    needy = row("needy", packages=("surely_not_installed_anywhere",))
    assert ask((needy,)).chosen is needy  # a question about another machine
    assert ask((needy,), installed=installed_packages((needy,))).chosen is None
    assert installed_packages((row("json", packages=("json",)),)) == {"json"}


def test_it_asks_nothing_of_the_machine(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("resolve asked the machine"))
    for arch in KNOWN:
        for stage in Stage:
            resolve(stage, PROBLEM, Device.named(arch))


@pytest.mark.parametrize("geometry", [FP8, ODD, GLM_TP4], ids=str)
@pytest.mark.parametrize("arch", KNOWN)
def test_eager_runs_everything_everywhere(geometry, arch):
    problem = geometry.problem(max_num_tokens=8, max_num_requests=2, max_model_len=100)
    for stage in Stage:
        answer = resolve(stage, problem, Device.named(arch), backend="eager")
        assert answer.chosen.name == "eager"


def test_the_table_is_well_formed():
    assert {row.stage for row in TABLE if row.name == "eager"} == set(Stage)
    assert len({(row.stage, row.name) for row in TABLE}) == len(TABLE)
    for entry in TABLE:
        module, _, kernel = entry.path.partition(":")
        assert module.startswith("sparse_mla.backends.")
        assert kernel.isidentifier()
        assert set(entry.proved_on) <= {"cpu", "cuda", "rocm"}
    for stage in Stage:
        assert [row.name for row in TABLE if row.stage == stage][-1] == "eager", "the row without limits comes last"
