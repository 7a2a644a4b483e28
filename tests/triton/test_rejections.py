"""What the Triton backend refuses, with every reason and value; and kernels that turn out not to compile."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

from sparse_mla.attention import SparseMLA
from sparse_mla.backends.eager.attend import Attend
from sparse_mla.backends.eager.select import Select
from sparse_mla.backends.table import TABLE, TRITON_ARCHS
from sparse_mla.backends.triton import launch, select
from sparse_mla.cache import index_fp8
from sparse_mla.device import Device
from sparse_mla.errors import BackendRejectedError, KernelError, StrictModeError
from sparse_mla.plan import make_plan
from sparse_mla.problem import Stage
from sparse_mla.resolve import resolve
from sparse_mla.testing.conformance.rows import prompts_of
from sparse_mla.testing.geometries import FP8, GLM_TP4, PLAIN, plain_caches
from sparse_mla.testing.lane import Span, new_layer
from sparse_mla.workspace import Workspace

CPU = Device.named("cpu")
OLDER = replace(Device.named("gfx942"), arch="gfx90a", fp8="")
SIZES = {"max_num_tokens": 64, "max_num_requests": 4, "max_model_len": 256}


def refusal(geometry, device, **more):
    with pytest.raises(BackendRejectedError) as caught:
        make_plan(geometry.problem(**SIZES), device, backend="triton", **more)
    return caught.value


def test_on_a_cpu():
    error = refusal(PLAIN, CPU, assume_installed=True)
    assert [str(reason) for reason in error.reasons] == [f"device  needs {' or '.join(TRITON_ARCHS)}, got cpu"]
    assert error.headline == 'backend "triton" cannot run stage "write" on cpu'
    assert 'backend="eager"' in str(error)


def test_an_architecture_outside_the_matrix():
    (reason,) = refusal(PLAIN, OLDER, assume_installed=True).reasons
    assert (reason.what, reason.got) == ("device", "gfx90a")


def test_a_cache_dtype_and_a_device_and_a_size_each_have_a_reason_with_their_value():
    geometry = replace(FP8, dims=replace(FP8.dims, index_head_dim=96), index=index_fp8(96))
    reasons = {reason.what: reason.got for reason in refusal(geometry, OLDER, assume_installed=True).reasons}
    assert reasons == {"device": "gfx90a", "latent cache": "fp8_ds_mla:fp8", "index_head_dim": "96"}


@pytest.mark.parametrize(
    ("stage", "changes", "reasons"),
    [
        (Stage.SELECT, {"index_n_heads": 65, "index_topk": 5000}, {"index_n_heads": "65", "index_topk": "5000"}),
        (
            Stage.ATTEND,
            {"num_heads": 129, "kv_lora_rank": 256, "qk_rope_head_dim": 32},
            {"kv_lora_rank": "256", "qk_rope_head_dim": "32", "attention heads per rank": "129"},
        ),
    ],
)
def test_sizes_of_each_stage(stage, changes, reasons):
    dims = replace(PLAIN.dims, **changes)
    problem = plain_caches("odd", dims).problem(**SIZES)
    answer = resolve(stage, problem, Device.named("sm90"), backend="triton")
    assert {reason.what: reason.got for reason in answer.verdicts[0].reasons} == reasons
    with pytest.raises(BackendRejectedError) as caught:
        answer.require()
    assert [reason.got for reason in caught.value.reasons] == list(reasons.values())


def test_without_triton():
    problem = GLM_TP4.problem(**SIZES)
    answer = resolve(Stage.ATTEND, problem, Device.named("sm90"), backend="triton", installed=frozenset())
    with pytest.raises(BackendRejectedError, match=r"package  needs triton, got not installed\. pip install triton"):
        answer.require()
    assert resolve(Stage.ATTEND, problem, Device.named("sm90"), installed=frozenset()).require().name == "eager"


class Uncompilable(Attend):
    """An attend kernel whose compiler fails."""

    def warm_up(self, where):
        raise KernelError("attend_rows", needs="to compile", got="out of shared memory")


EAGER = tuple(row for row in TABLE if row.name == "eager")
FIRST = replace(
    next(row for row in EAGER if row.stage == Stage.ATTEND),
    name="first",
    path=f"{__name__}:Uncompilable",
    scratch=lambda problem, device, budget: (),
)


def lane(rows, backend="auto"):
    plan = make_plan(PLAIN.problem(**SIZES), CPU, backend=backend, rows=rows)
    return SparseMLA(plan, Workspace())


def answer(operator):
    layer = new_layer(PLAIN, prompts_of(PLAIN, "normal", (40,)))
    span = [Span(0, 0, 40)]
    asked, batch = layer.asked(span), layer.batch(span)
    operator.write_latent(layer.rows("kv_c", span), layer.rows("k_pe", span), layer.latent, layer.slots(span[0]))
    operator.write_index(layer.rows("index_k", span), layer.index, layer.slots(span[0]))
    indices = operator.select(asked.index_q, asked.weights, layer.index, batch)
    return operator.attend(asked.q, layer.latent, indices, batch, 0.1, return_lse=True)


def test_under_auto_the_next_row_serves_and_says_so():
    operator, plain = lane((FIRST, *EAGER)), lane(EAGER)
    assert operator.plan.attend.row.name == "first"
    text = 'backend "first" cannot run stage "attend": attend_rows on cpu  needs to compile, got out of shared memory; eager runs it'
    with pytest.warns(RuntimeWarning, match=text):
        operator.warm_up()
    assert operator.plan.describe() == plain.plan.describe()
    assert [str(reason) for reason in operator.plan.attend.resolution.verdicts[0].reasons] == [
        "attend_rows on cpu  needs to compile, got out of shared memory"
    ]
    got, wanted = answer(operator), answer(plain)
    assert torch.equal(got.out, wanted.out)
    assert torch.equal(got.lse, wanted.lse)


class Disagreeing(Select):
    """A select whose two kernels give different bits."""

    def warm_up(self, where):
        raise StrictModeError("score_rows", needs="the bits of score_tiles", got="others")


SECOND = replace(
    next(row for row in EAGER if row.stage == Stage.SELECT),
    name="second",
    path=f"{__name__}:Disagreeing",
    scratch=lambda problem, device, budget: (),
)


def test_bits_that_differ_cost_the_promise_and_not_the_kernel():
    plan = make_plan(PLAIN.problem(**SIZES, deterministic=False), CPU, rows=(SECOND, *EAGER))
    assert plan.select.mode == "strict"
    operator = SparseMLA(plan, Workspace())
    with pytest.warns(
        RuntimeWarning, match='stage "select" runs in fast mode: score_rows: needs the bits of score_tiles'
    ):
        operator.warm_up()
    assert (operator.plan.select.row.name, operator.plan.select.mode) == ("second", "fast")
    assert operator.plan.scratch_bytes == plan.scratch_bytes


@pytest.mark.parametrize("agree", [True, False])
def test_where_bits_differ_the_sample_is_not_drawn(monkeypatch, agree):
    """Rows that take the exact path are scored by the other kernel there: a draw would then show in bits."""
    monkeypatch.setattr(select, "launch", lambda *_, **__: None)
    monkeypatch.setattr(select, "scores_agree", lambda *_: agree)
    problem = PLAIN.problem(**SIZES, deterministic=False)
    seeds = set()
    for _ in range(4):
        kernels = select.Select(problem, CPU)
        with nullcontext() if agree else pytest.raises(StrictModeError):
            kernels.warm_up(torch.device("cpu"))
        seeds.add(kernels._seed)
    assert (len(seeds) > 1) is agree


def test_bits_that_differ_give_way_where_strict_mode_was_asked_for():
    operator = SparseMLA(make_plan(PLAIN.problem(**SIZES), CPU, rows=(SECOND, *EAGER)), Workspace())
    with pytest.warns(
        RuntimeWarning, match="score_rows on cpu  needs the bits of score_tiles, got others; eager runs it"
    ):
        operator.warm_up()
    assert (operator.plan.select.row.name, operator.plan.select.mode) == ("eager", "strict")


def test_asked_for_by_name_it_is_refused():
    rows = (FIRST, *(replace(row, name="first") for row in EAGER if row.stage != Stage.ATTEND), *EAGER)
    operator = lane(rows, backend="first")
    with pytest.raises(BackendRejectedError, match=r'(?s)"first" cannot run stage "attend".*got out of shared memory'):
        operator.warm_up()


def test_without_a_next_row_it_is_refused():
    operator = lane((FIRST, *(row for row in EAGER if row.stage != Stage.ATTEND)))
    with pytest.raises(BackendRejectedError, match="no backend can run"):
        operator.warm_up()


class Kernel:
    """Stands for a compiled function whose start fails."""

    def __init__(self, error):
        self.error = error
        self.fn = SimpleNamespace(__name__="score_rows")

    def __getitem__(self, grid):
        def start(*args, **options):
            raise self.error

        return start


@pytest.mark.parametrize(
    "error",
    [
        triton.runtime.errors.OutOfResources(262144, 101376, "shared memory"),
        triton.runtime.errors.PTXASError("ptxas\nfatal   : (C7602) Internal"),
        RuntimeError("PassManager::run failed"),
    ],
)
def test_what_triton_raises_is_told_as_a_kernel_that_does_not_compile(error):
    with pytest.raises(KernelError, match="score_rows: needs to compile, got ") as caught:
        launch.launch(Kernel(error), (1,))
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_faults_stay_what_they_are():
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        launch.launch(Kernel(RuntimeError("CUDA error: an illegal memory access was encountered")), (1,))
