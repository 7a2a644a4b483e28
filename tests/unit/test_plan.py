from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.backends.eager.scratch import KEY_TILE, MAX_SELECT_ROWS
from sparse_mla.backends.table import TABLE
from sparse_mla.device import Device
from sparse_mla.errors import BackendRejectedError, UsageError
from sparse_mla.plan import make_plan
from sparse_mla.problem import Stage
from sparse_mla.requirements import Requires
from sparse_mla.testing.geometries import FP8, GLM_TP4, GLM_TP4_FP8, PLAIN
from sparse_mla.workspace import packed_bytes

CPU = Device.named("cpu")
MIB = 1 << 20


def problem(geometry=PLAIN, tokens=256, context=4096):
    return geometry.problem(max_num_tokens=tokens, max_num_requests=8, max_model_len=context)


def eager(*args, **rest):
    return make_plan(*args, backend="eager", **rest)


def test_stages_share_one_arena_as_large_as_the_largest():
    plan = eager(problem(), CPU)
    sizes = [stage.scratch_bytes for stage in plan.stages.values()]
    assert plan.scratch_bytes == max(sizes) > 0
    assert sizes == [packed_bytes(stage.buffers) for stage in plan.stages.values()]
    assert list(plan.stages) == list(Stage)


def test_describe_is_plain_data_and_complete():
    import json

    plan = eager(problem(FP8), Device.named("gfx950"))
    said = json.loads(json.dumps(plan.describe()))
    assert said["device"] == "gfx950"
    assert said["index_topk"] == FP8.dims.index_topk
    assert said["scratch_bytes"] == plan.scratch_bytes
    assert {name: stage["backend"] for name, stage in said["stages"].items()} == dict.fromkeys(
        ("write", "select", "attend"), "eager"
    )
    assert {stage["mode"] for stage in said["stages"].values()} == {"strict"}


def test_the_environment_names_the_backend_and_an_argument_wins(monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "nobody")
    with pytest.raises(UsageError, match="'nobody'"):
        make_plan(problem(), CPU)
    assert eager(problem(), CPU).select.row.name == "eager"
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "eager")
    assert make_plan(problem(), CPU).attend.resolution.requested == "eager"


def test_the_environment_sets_the_budget_and_an_argument_wins(monkeypatch):
    large = problem(GLM_TP4, 8192, 200_000)
    monkeypatch.setenv("SPARSE_MLA_SCRATCH_MIB", "120")
    small = eager(large, CPU).select
    assert small == eager(large, CPU, budget_bytes=120 * MIB).select
    assert small.scratch_bytes < eager(large, CPU, budget_bytes=256 * MIB).select.scratch_bytes
    monkeypatch.setenv("SPARSE_MLA_SCRATCH_MIB", "none")
    with pytest.raises(UsageError, match="SPARSE_MLA_SCRATCH_MIB"):
        eager(large, CPU)


def test_an_explicit_backend_that_cannot_run_is_not_replaced():
    strange = tuple(
        replace(row, name="strange", requires=Requires(archs=("sm90",))) for row in TABLE if row.name == "eager"
    )
    with pytest.raises(BackendRejectedError, match='backend "strange" cannot run stage "write" on cpu'):
        make_plan(problem(), CPU, backend="strange", rows=(*strange, *TABLE))
    assert make_plan(problem(), CPU, backend="auto", rows=(*strange, *TABLE)).write.row.name != "strange"


def test_packages_that_are_missing_here_do_not_matter_elsewhere():
    needy = tuple(
        replace(row, name="needy", requires=Requires(packages=("surely_not_installed_anywhere",)))
        for row in TABLE
        if row.name == "eager"
    )
    with pytest.raises(BackendRejectedError, match="surely_not_installed_anywhere, got not installed"):
        make_plan(problem(), CPU, backend="needy", rows=needy)
    plan = make_plan(problem(), CPU, backend="needy", rows=needy, assume_installed=True)
    assert plan.select.row.name == "needy"


def buffers(plan):
    return {spec.name: spec.shape for spec in plan.select.buffers}


@settings(max_examples=60)
@given(st.integers(1, 300_000), st.integers(1, 16384), st.sampled_from([64, 128, 256]))
def test_select_promises_every_key_and_cuts_rows_to_the_budget(context, tokens, mib):
    plan = eager(problem(GLM_TP4, tokens, context), CPU, budget_bytes=mib * MIB)
    shapes = buffers(plan)
    padded = shapes["keys"][0]
    assert padded >= context
    assert padded % KEY_TILE == 0
    assert padded - context < KEY_TILE
    rows, columns = shapes["scores"]
    assert columns == padded
    assert 1 <= rows <= MAX_SELECT_ROWS
    over = plan.select.scratch_bytes - mib * MIB
    fixed = sum(spec.nbytes for spec in plan.select.buffers if spec.name in {"products", "stored"}) + 5 * 256
    assert over <= fixed or rows == 1, "more rows than the budget holds"


def test_attend_does_not_grow_with_the_context():
    small, large = (eager(problem(GLM_TP4_FP8, 8192, context), CPU) for context in (4096, 1_000_000))
    assert small.attend.buffers == large.attend.buffers


def test_a_larger_envelope_of_rows_costs_no_more_than_the_chunk():
    few, many = (eager(problem(GLM_TP4, tokens, 100_000), CPU) for tokens in (64, 16384))
    assert few.scratch_bytes == many.scratch_bytes


def test_plans_are_values():
    assert eager(problem(), CPU) == eager(problem(), CPU)
