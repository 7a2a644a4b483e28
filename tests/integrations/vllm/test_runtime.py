"""The comparison before the first request: right kernels pass, each kind of wrong one is refused and named."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from sparse_mla.attention import SparseMLA
from sparse_mla.backends.eager.attend import Attend
from sparse_mla.backends.eager.select import Select
from sparse_mla.backends.eager.write import Write
from sparse_mla.cache import fp8_ds_mla, index_fp8, plain
from sparse_mla.device import probe
from sparse_mla.dims import MLADims
from sparse_mla.errors import BackendRejectedError, ConfigError
from sparse_mla.integrations.vllm.runtime import Runtime, require_schedule
from sparse_mla.plan import make_plan
from sparse_mla.problem import Problem
from sparse_mla.testing.tiny_model import tiny_config
from sparse_mla.workspace import Workspace

TINY = MLADims.from_config(tiny_config())


def runtime(*, dims=TINY, dtype="bf16", latent=None, index=None, **sizes) -> Runtime:
    limits = {"max_num_tokens": 256, "max_num_requests": 4, "max_model_len": 1024, **sizes}
    problem = Problem(
        dims=dims,
        dtype=dtype,
        latent=latent or plain(dims.head_dim, dtype),
        index=index or index_fp8(dims.index_head_dim),
        latent_block_size=16,
        index_block_size=16,
        **limits,
    )
    return Runtime(make_plan(problem, probe()), torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("latent", [None, fp8_ds_mla()])
def test_right_kernels_pass(dtype, latent):
    runtime(dtype=dtype, latent=latent).prove()
    runtime(dtype=dtype, latent=latent, index=plain(128, dtype)).prove()


@pytest.mark.parametrize("latent", [None, fp8_ds_mla()])
def test_the_callers_default_dtype_changes_nothing(latent):
    """vLLM loads models, and so runs the comparison, with torch's default dtype set to the model's."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        runtime(latent=latent).prove()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("sizes", [{"max_model_len": 3}, {"max_num_tokens": 1}, {"max_num_tokens": 7}])
def test_small_engines_are_checked_too(sizes):
    runtime(**sizes).prove()


def test_the_check_of_one_rank_of_a_real_model_takes_under_five_seconds():
    dims = dataclasses.replace(TINY, num_heads=16, index_n_heads=32, index_topk=2048, qk_nope_head_dim=192)
    ours = runtime(dims=dims, latent=fp8_ds_mla(), max_model_len=8192)
    start = time.process_time()
    ours.prove()
    assert time.process_time() - start < 5 * torch.get_num_threads()


def keep_last(self, *args):
    _, _, _, batch, out, lens, *_ = args
    out.fill_(-1)
    for row, seen in enumerate(batch.visible_lens.tolist()):
        picked = torch.arange(max(0, seen - out.shape[1]), seen)
        out[row, : picked.numel()] = picked
        lens[row] = picked.numel()


def one_key_too_many(self, *args):
    index_q, weights, view, batch, *rest = args
    RIGHT_SELECT(self, index_q, weights, view, dataclasses.replace(batch, visible_lens=batch.visible_lens - 1), *rest)


def wrong_scale(self, q, view, indices, batch, softmax_scale, *rest):
    RIGHT_ATTEND(self, q, view, indices, batch, softmax_scale * 1.01, *rest)


def depends_on_neighbours(self, q, view, indices, batch, softmax_scale, out, *rest):
    RIGHT_ATTEND(self, q, view, indices, batch, softmax_scale, out, *rest)
    if batch.num_tokens > 1:
        out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(9.0, dtype=out.dtype))


def next_slot(self, index_k, view, slots):
    RIGHT_INDEX(self, index_k, view, torch.where(slots % view.block_size == 0, slots + 1, slots))


RIGHT_SELECT, RIGHT_ATTEND, RIGHT_INDEX = Select.__call__, Attend.__call__, Write.index


@pytest.mark.parametrize(
    ("where", "name", "broken", "words"),
    [
        (Select, "__call__", keep_last, "selected indices"),
        (Select, "__call__", one_key_too_many, "selected indices"),
        (Attend, "__call__", wrong_scale, "attention output"),
        (Attend, "__call__", depends_on_neighbours, "output of one row alone"),
        (Write, "index", next_slot, "index cache"),
    ],
)
def test_a_broken_kernel_is_refused_and_named(where, name, broken, words, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    ours = runtime(dtype="f32")
    with pytest.raises(BackendRejectedError, match="nothing is served") as caught:
        ours.prove()
    assert any(words in str(reason) for reason in caught.value.reasons)


def test_equal_problems_share_one_runtime_while_one_lives():
    plan = make_plan(runtime().plan.problem, probe())
    first = Runtime.of(plan, torch.device("cpu"))
    assert Runtime.of(make_plan(plan.problem, probe()), torch.device("cpu")) is first
    other = dataclasses.replace(plan.problem, max_num_tokens=77)
    assert Runtime.of(make_plan(other, probe()), torch.device("cpu")) is not first


def test_the_workspace_is_reserved_and_locked_before_the_first_call():
    ours = runtime()
    arena = ours.attention._workspace
    assert arena.nbytes >= ours.plan.scratch_bytes > 0
    with pytest.raises(Exception, match="locked"):
        arena.reserve(arena.nbytes + 1)


def test_kernels_are_compiled_and_scratch_is_touched_before_the_engine_measures_memory(monkeypatch):
    done = []
    monkeypatch.setattr(SparseMLA, "warm_up", lambda _: done.append("compiled"))
    monkeypatch.setattr(Workspace, "fill", lambda _, byte: done.append(byte))
    runtime()
    assert done == ["compiled", 0]


def test_kernels_are_compared_once(monkeypatch):
    compared = []
    monkeypatch.setattr("sparse_mla.integrations.vllm.runtime.differences", lambda _: compared.append("once") or [])
    ours = runtime()
    ours.prove()
    ours.prove()
    assert compared == ["once"]


SHARED = MLADims.from_config(tiny_config(num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"]))


@pytest.mark.parametrize(
    "built",
    [
        {0: True, 1: False, 2: True, 3: False},
        {2: True, 3: False},
        {0: True, 1: False, 2: True, 3: False, 4: True},
        {},
    ],
)
def test_schedules_that_agree(built):
    require_schedule(SHARED, built)


@pytest.mark.parametrize(
    ("built", "words"),
    [
        ({0: True, 1: True, 2: True, 3: False}, "layer 1 otherwise than the config states"),
        ({0: True, 1: False, 2: False, 3: False}, "layer 2 otherwise"),
        ({1: False, 2: True, 3: False}, "this pipeline stage starts on layer 1"),
    ],
)
def test_layers_that_would_read_stale_indices_are_refused(built, words):
    with pytest.raises(ConfigError, match=words):
        require_schedule(SHARED, built)
