from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_mla.attention import AttentionOutput, SparseMLA
from sparse_mla.backends.eager.select import pick
from sparse_mla.backends.table import TABLE
from sparse_mla.batch import BatchLayout
from sparse_mla.errors import CacheFormatError, ShapeError, WorkspaceError
from sparse_mla.testing.candidates import Candidate, from_table
from sparse_mla.testing.geometries import FP8, PLAIN
from sparse_mla.testing.inputs import Prompt, cache_of
from sparse_mla.testing.lane import Lane, Span, new_layer
from sparse_mla.workspace import Workspace

EAGER = from_table("eager")
PROBLEM = PLAIN.problem(max_num_tokens=40, max_num_requests=2, max_model_len=64)
SPAN = Span(0, 0, 30)


@pytest.fixture
def lane():
    return Lane(EAGER, PROBLEM)


@pytest.fixture
def layer(lane):
    layer = new_layer(PLAIN, [Prompt(dims=PLAIN.dims, length=48, seed=3)])
    lane.write(layer, [SPAN])
    return layer


def inputs(layer, span=SPAN):
    return layer.asked([span]), layer.batch([span])


def test_out_lens_and_lse_are_the_callers_or_made(lane, layer):
    asked, batch = inputs(layer)
    made = lane.operator.select(asked.index_q, asked.weights, layer.index, batch)
    given = torch.empty_like(made)
    assert lane.operator.select(asked.index_q, asked.weights, layer.index, batch, out=given) is given
    assert torch.equal(made, given)
    without = lane.operator.attend(asked.q, layer.latent, made, batch, 0.1)
    assert without.lse is None
    out = torch.full_like(without.out, torch.nan)
    both = lane.operator.attend(asked.q, layer.latent, made, batch, 0.1, out=out, return_lse=True)
    assert isinstance(both, AttentionOutput)
    assert both.out is out
    assert torch.equal(out, without.out)
    assert both.lse.dtype == torch.float32
    assert both.lse.shape == (30, PLAIN.dims.num_heads)


def test_out_may_be_a_slice_of_a_wider_buffer(lane, layer):
    asked, batch = inputs(layer)
    wide = torch.full((33, PLAIN.dims.index_topk + 9), 77, dtype=torch.int32)
    target = wide[2:32, 4 : 4 + PLAIN.dims.index_topk]
    lane.operator.select(asked.index_q, asked.weights, layer.index, batch, out=target)
    assert torch.equal(target, lane.operator.select(asked.index_q, asked.weights, layer.index, batch))
    outside = torch.ones_like(wide, dtype=torch.bool)
    outside[2:32, 4 : 4 + PLAIN.dims.index_topk] = False
    assert (wide[outside] == 77).all()


def test_queries_may_be_strided(lane, layer):
    asked, batch = inputs(layer)
    indices = lane.operator.select(asked.index_q, asked.weights, layer.index, batch)
    spread = asked._replace(
        index_q=torch.stack([asked.index_q, asked.index_q], -1)[..., 0],
        weights=asked.weights.T.contiguous().T,
        q=asked.q.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert torch.equal(lane.operator.select(spread.index_q, spread.weights, layer.index, batch), indices)
    plain = lane.operator.attend(asked.q, layer.latent, indices, batch, 0.1).out
    assert torch.equal(lane.operator.attend(spread.q, layer.latent, indices, batch, 0.1).out, plain)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a._replace(index_q=a.index_q[:29]), r"index_q has the wrong shape: needs \[T, H_i, D_i\]"),
        (lambda a: a._replace(index_q=a.index_q.double()), "index_q has the wrong dtype"),
        (lambda a: a._replace(index_q=a.index_q[:, :3]), "H_i = 4"),
        (lambda a: a._replace(index_q=a.index_q[:, 0]), "index_q has the wrong rank"),
        (lambda a: a._replace(weights=a.weights.bfloat16()), "index_weights has the wrong dtype"),
        (lambda a: a._replace(weights=a.weights[:, :3]), "index_weights has the wrong shape"),
    ],
)
def test_select_refuses_tensors_that_do_not_fit(lane, layer, change, said):
    asked, batch = inputs(layer)
    bad = change(asked)
    with pytest.raises(ShapeError, match=said):
        lane.operator.select(bad.index_q, bad.weights, layer.index, batch)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("out", torch.empty(30, 25, dtype=torch.int32), r"out has the wrong shape: needs \[T, K\] i32"),
        ("out", torch.empty(30, 24, dtype=torch.int64), "out has the wrong dtype"),
        ("lens", torch.empty(29, dtype=torch.int32), "lens has the wrong shape"),
        ("lens", torch.empty(30, 1, dtype=torch.int32), "lens has the wrong rank"),
    ],
)
def test_select_refuses_outputs_that_do_not_fit(lane, layer, name, value, said):
    asked, batch = inputs(layer)
    with pytest.raises(ShapeError, match=said):
        lane.operator.select(asked.index_q, asked.weights, layer.index, batch, **{name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": lambda q: q[..., :-1]}, "q has the wrong shape"),
        ({"q": lambda q: q.float()}, r"q has the wrong dtype: needs \[T, H, D_c\+D_r\] bf16, got .* f32"),
        ({"q": lambda q: q[:, :3]}, "H = 4"),
        ({"indices": lambda i: i.long()}, "indices has the wrong dtype"),
        ({"indices": lambda i: i[:, 1:]}, "K = 24"),
        ({"out": lambda o: o.float()}, "out has the wrong dtype"),
        ({"out": lambda o: o[..., 1:]}, "out has the wrong shape"),
    ],
)
def test_attend_refuses_tensors_that_do_not_fit(lane, layer, change, said):
    asked, batch = inputs(layer)
    tensors = {
        "q": asked.q,
        "indices": torch.zeros(30, 24, dtype=torch.int32),
        "out": torch.empty(30, 4, 512, dtype=torch.bfloat16),
    }
    for name, spoil in change.items():
        tensors[name] = spoil(tensors[name])
    with pytest.raises(ShapeError, match=said):
        lane.operator.attend(tensors["q"], layer.latent, tensors["indices"], batch, 0.1, out=tensors["out"])


def test_write_refuses_what_does_not_fit(lane, layer):
    rows = {name: layer.rows(name, [SPAN]) for name in ("kv_c", "k_pe", "index_k")}
    slots, verbs = layer.slots(SPAN), lane.operator
    with pytest.raises(ShapeError, match="k_pe has the wrong shape"):
        verbs.write_latent(rows["kv_c"], rows["k_pe"][:-1], layer.latent, slots)
    with pytest.raises(ShapeError, match="kv_c has the wrong dtype"):
        verbs.write_latent(rows["kv_c"].float(), rows["k_pe"], layer.latent, slots)
    with pytest.raises(ShapeError, match="slots has the wrong dtype"):
        verbs.write_index(rows["index_k"], layer.index, slots.int())
    with pytest.raises(ShapeError, match="slots: needs at most 30 entries, one a row, got 31"):
        verbs.write_index(rows["index_k"], layer.index, torch.zeros(31, dtype=torch.int64))
    before = layer.index.storage.clone()
    slots[7] = layer.index.num_slots
    with pytest.raises(ShapeError, match=f"needs slots below {layer.index.num_slots}, got {layer.index.num_slots}"):
        verbs.write_index(rows["index_k"], layer.index, slots)
    assert torch.equal(layer.index.storage, before), "a refused write left rows behind"


def test_a_call_beyond_the_plan_is_refused_before_it_runs(lane, layer):
    problem = PROBLEM
    for spans, said in (
        ([Span(0, 0, 41)], f"batch tokens: needs <= {problem.max_num_tokens}, got 41"),
        ([Span(0, 0, 1)] * 3, "batch requests: needs <= 2, got 3"),
    ):
        asked = layer.asked(spans)
        with pytest.raises(ShapeError, match=said):
            lane.operator.select(asked.index_q, asked.weights, layer.index, layer.batch(spans))
    asked, batch = inputs(layer)
    with pytest.raises(ShapeError, match="longest request: needs <= 64, got 65"):
        lane.operator.select(asked.index_q, asked.weights, layer.index, replace(batch, seq_lens=(65,)))
    with pytest.raises(ShapeError, match="block table of the longest request, in tokens: needs <= 48, got 49"):
        lane.operator.select(asked.index_q, asked.weights, layer.index, replace(batch, seq_lens=(49,)))


def test_a_cache_of_another_layout_is_refused(lane, layer):
    asked, batch = inputs(layer)
    strange = cache_of(FP8.index, 16, 3, seed=1)
    with pytest.raises(
        CacheFormatError, match=r"index cache: needs the plan's plain\[64 bf16\], got index_fp8\[64 fp8\]"
    ):
        lane.operator.select(asked.index_q, asked.weights, strange, batch)


def test_a_view_may_carry_a_write_rule_of_its_own():
    lane = Lane(EAGER, FP8.problem(max_num_tokens=40, max_num_requests=2, max_model_len=64))
    layer = new_layer(FP8, [Prompt(dims=FP8.dims, length=48, seed=3)])
    rule = replace(FP8.index.rule, power_of_two=False)
    other = replace(layer, index=replace(layer.index, format=replace(FP8.index, rule=rule)))
    lane.write(other, [SPAN])
    slots = layer.slots(SPAN)
    scales = layer.index.field("scale")[slots // 16, slots % 16, 0]
    assert torch.equal(scales, layer.rows("index_k", [SPAN]).float().abs().amax(-1) / 448)


def test_the_operator_reserves_what_it_needs_and_no_call_allocates_scratch(layer):
    space = Workspace()
    operator = SparseMLA(EAGER.plan(PROBLEM), space)
    assert space.nbytes == operator.plan.scratch_bytes
    space.lock()
    asked, batch = inputs(layer)
    operator.select(asked.index_q, asked.weights, layer.index, batch)
    small = Workspace()
    small.reserve(10)
    small.lock()
    with pytest.raises(WorkspaceError, match="locked"):
        SparseMLA(EAGER.plan(PROBLEM), small)


def test_nan_rows_are_counted_until_they_are_zeroed(lane, layer):
    asked, batch = inputs(layer)
    weights = asked.weights.clone()
    weights[[3, 9]] = torch.nan
    lane.operator.select(asked.index_q, weights, layer.index, batch)
    assert lane.operator.nan_rows.tolist() == [2]
    lane.operator.select(asked.index_q, weights, layer.index, batch)
    assert lane.operator.nan_rows.tolist() == [4]
    lane.operator.nan_rows.zero_()
    lane.operator.select(asked.index_q, asked.weights, layer.index, batch)
    assert lane.operator.nan_rows.tolist() == [0]


class Recorder:
    """A kernel of each stage that remembers what it was given."""

    def __init__(self, problem, device):
        self.warmed, self.calls = [], []

    def warm_up(self, where):
        self.warmed.append(where)

    def __call__(self, *arguments):
        self.calls.append(arguments)

    latent = index = __call__


def test_kernels_are_bound_once_and_warmed_where_they_run():
    rows = [replace(row, name="recorder", path=f"{__name__}:Recorder") for row in TABLE if row.name == "eager"]
    operator = Candidate.of("recorder", rows).operator(PROBLEM)
    layer = new_layer(PLAIN, [Prompt(dims=PLAIN.dims, length=48, seed=3)])
    asked, batch = inputs(layer)
    kernels = [operator._write, operator._select, operator._attend]
    assert [kernel.warmed for kernel in kernels] == [[torch.device("cpu")]] * 3
    operator.select(asked.index_q, asked.weights, layer.index, batch)
    operator.select(asked.index_q, asked.weights, layer.index, batch)
    assert len(operator._select.calls) == 2
    scratch = operator._select.calls[0][-1]
    assert set(scratch) == {spec.name for spec in operator.plan.select.buffers}


def test_rows_behind_the_slots_never_reach_a_kernel():
    rows = [replace(row, name="recorder", path=f"{__name__}:Recorder") for row in TABLE if row.name == "eager"]
    operator = Candidate.of("recorder", rows).operator(PROBLEM)
    layer = new_layer(PLAIN, [Prompt(dims=PLAIN.dims, length=48, seed=3)])
    operator.write_index(layer.rows("index_k", [SPAN]), layer.index, layer.slots(SPAN)[:11])
    assert operator._write.calls[0][0].shape[0] == 11


def test_an_empty_call_of_every_verb(lane, layer):
    nothing = BatchLayout.build(query_lens=[], seq_lens=[], block_table=torch.zeros(0, 3, dtype=torch.int32))
    asked = layer.asked([])
    indices = lane.operator.select(asked.index_q, asked.weights, layer.index, nothing)
    assert indices.shape == (0, 24)
    out = lane.operator.attend(asked.q, layer.latent, indices, nothing, 0.1, return_lse=True)
    assert (out.out.shape, out.lse.shape) == ((0, 4, 512), (0, 4))


@pytest.mark.parametrize("topk", [40, 2048, 19_000])
def test_picking_from_many_keys_is_a_stable_sort_however_many_are_wanted(topk):
    """The first cut samples every fourth score here; wanting nearly all of them must not ask the sample for too much."""
    scores = torch.randn(20_000, generator=torch.Generator().manual_seed(topk)).half().float()
    picked, only_nan = pick(scores, topk)
    wanted = scores.sort(descending=True, stable=True).indices[:topk].sort().values
    assert torch.equal(picked, wanted)
    assert not only_nan
