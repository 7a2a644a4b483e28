"""The suite's own tools: inputs that do not depend on how they are cut, comparisons that can fail, counts that are true."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.backends.table import TABLE
from sparse_mla.errors import UsageError
from sparse_mla.problem import Stage
from sparse_mla.reference import attend as reference_attend
from sparse_mla.reference import select as reference_select
from sparse_mla.reference.write import encode_row
from sparse_mla.requirements import Requires
from sparse_mla.testing.candidates import Candidate, from_outside, from_table, resolving
from sparse_mla.testing.compare import (
    ConformanceError,
    check_attention,
    check_same,
    check_selection,
    demand,
    first_difference,
    refusal,
    require,
)
from sparse_mla.testing.conformance import geometry as grid
from sparse_mla.testing.conformance.parameters import CASES
from sparse_mla.testing.geometries import FNUZ, FP8, MODELS, PLAIN, SMALL, TAGS
from sparse_mla.testing.inputs import Prompt, cache_of, interleaved, scattered_blocks, slots_for
from sparse_mla.testing.meter import peak_bytes
from sparse_mla.testing.scores import SCORE_SETS, asking, keys_with

DIMS = PLAIN.dims
NAMES = ("kv_c", "k_pe", "index_k", "index_q", "index_weights", "q")


@given(st.sampled_from(NAMES), st.integers(0, 200), st.integers(0, 90), st.sampled_from(["normal", "integer", "tied"]))
def test_rows_do_not_depend_on_how_they_are_cut(name, start, count, kind):
    prompt = Prompt(dims=DIMS, length=300, seed=5, kind=kind)
    rows = prompt.rows(name, start, start + count)
    assert rows.shape[0] == count
    assert torch.equal(rows, prompt.rows(name, 0, 300)[start : start + count])
    positions = list(range(start, start + count, 3))
    assert torch.equal(prompt.at(name, positions), rows[::3])


def test_rows_depend_on_seed_position_and_name():
    prompt = Prompt(dims=DIMS, length=300, seed=5)
    keys = prompt.rows("index_k", 0, 200)
    assert torch.unique(keys, dim=0).shape[0] == 200
    assert not torch.equal(keys, replace(prompt, seed=6).rows("index_k", 0, 200))
    assert torch.equal(keys, replace(prompt, length=77).rows("index_k", 0, 200))
    assert prompt.rows("index_weights", 0, 3).dtype == torch.float32
    assert prompt.rows("q", 0, 3).dtype == torch.bfloat16
    assert (prompt.rows("index_weights", 0, 200) < 0).any()


@pytest.mark.parametrize(("kind", "least"), [("tied", 0.9), ("integer", 0.1)])
def test_integer_and_tied_prompts_tie_at_the_kth_place(kind, least):
    prompt = Prompt(dims=DIMS, length=128, seed=1, kind=kind)
    keys, tied, rows = prompt.rows("index_k", 0, 128), 0, range(DIMS.index_topk, 128)
    for row in rows:
        q, w = prompt.rows("index_q", row, row + 1)[0], prompt.rows("index_weights", row, row + 1)[0]
        ranked = reference_select.scores(q, w, keys[: row + 1], torch.ones(row + 1)).sort(descending=True).values
        tied += bool(ranked[DIMS.index_topk - 1] == ranked[DIMS.index_topk])
    assert tied >= least * len(rows)


@given(st.lists(st.integers(0, 70), max_size=5), st.integers(1, 20), st.integers(0, 9))
def test_blocks_are_shuffled_and_owned_by_one_request(lens, block_size, seed):
    table, num_blocks = scattered_blocks(lens, block_size, seed=seed)
    owned = table[table >= 0].tolist()
    assert len(set(owned)) == len(owned) == sum(-(-length // block_size) for length in lens)
    assert all(block < num_blocks for block in owned)
    for row, length in zip(table, lens, strict=True):
        slots = slots_for(row, block_size, 0, length).tolist()
        assert len(set(slots)) == length
        assert all(0 <= slot < num_blocks * block_size for slot in slots)
        assert (row[-(-length // block_size) :] == -1).all()


def test_junk_caches_hold_nan_and_the_gaps_are_nobodys():
    view = cache_of(PLAIN.latent, 16, 5, seed=1, gap_bytes=64)
    assert view.field("values").isnan().any()
    assert view.block_stride_bytes == 16 * 1152 + 64
    first, second = interleaved([FP8.latent, FP8.index], 4, 3, seed=2)
    assert first.storage is second.storage
    assert second.offset_bytes == 4 * 656
    assert first.block_stride_bytes == second.block_stride_bytes == 4 * (656 + 68)


def test_a_bitwise_difference_says_where():
    a = torch.tensor([[1.0, torch.nan], [0.0, 2.0]])
    assert first_difference("x", a, a.clone()) is None
    other = a.clone()
    other[1, 0] = -0.0
    assert str(first_difference("x", other, a)) == "x differs at row 1: element 0 is -0.0, wanted 0.0"
    assert check_same("x", [a, a, a]) is None
    assert check_same("x", [a, a, other]) is not None
    with pytest.raises(ConformanceError, match="here: x differs at row 1"):
        demand(check_same("x", [a, other]), "here")


def test_require_and_refusal_can_fail():
    require(condition=True, message="never")
    with pytest.raises(ConformanceError, match="said so"):
        require(torch.tensor(False), "said so")
    with pytest.raises(ConformanceError, match="it was accepted"):
        refusal(lambda: None, UsageError, "it")

    def refuse():
        raise UsageError("no", needs=1)

    assert refusal(refuse, UsageError, "it") == "no: needs 1"


@pytest.fixture
def row():
    source = torch.Generator().manual_seed(8)
    keys, q = torch.randn(50, 16, generator=source), torch.randn(3, 16, generator=source)
    return q, torch.rand(3, generator=source), keys, torch.ones(50)


def selected(row, topk):
    indices = torch.full((topk,), -1, dtype=torch.int32)
    best = reference_select.top(reference_select.scores(*row), topk)
    indices[: best.numel()] = best.int()
    return indices


def test_the_references_own_selection_passes(row):
    for topk in (1, 7, 50, 60):
        assert check_selection(0, selected(row, topk), *row, exact=True) is None


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda i: i.flip(0), "not ascending"),
        (lambda i: torch.cat([i[:3], i[:3], i[6:]]), "not ascending"),
        (lambda i: torch.where(torch.arange(7) == 3, -1, i), "not ascending"),
        (lambda i: torch.where(torch.arange(7) == 6, -1, i), "6 indices, wanted 7"),
        (lambda i: torch.where(torch.arange(7) == 6, 50, i), "position 50 with 50 visible keys"),
    ],
)
def test_malformed_selections_are_caught(row, spoil, said):
    assert said in str(check_selection(0, spoil(selected(row, 7)).int(), *row))


def test_a_worse_key_is_caught_without_exactness_and_a_tie_is_excused_only_there(row):
    q, w, keys, scale = row
    best = selected(row, 7)
    ranked = reference_select.scores(*row).argsort(descending=True)
    worse = torch.cat([ranked[:6], ranked[20:21]]).sort().values.int()
    said = str(check_selection(0, worse, *row))
    assert "was selected with score" in said or "was left out with score" in said
    keys[ranked[7]] = keys[ranked[6]]  # the 8th now ties with the 7th
    row = q, w, keys, scale
    best, first, second = selected(row, 7), int(ranked[6]), int(ranked[7])
    winner, loser = min(first, second), max(first, second)
    other = torch.where(best == winner, loser, best).sort().values.int()
    assert check_selection(0, best, *row, exact=True) is None
    assert check_selection(0, other, *row) is None
    assert check_selection(0, other, *row, exact=True) is not None


def test_a_nan_that_was_selected_is_caught(row):
    q, w, keys, scale = row
    best = selected(row, 7)
    keys[int(best[2])] = torch.nan
    assert check_selection(0, best, q, w, keys, scale) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_is_judged_by_its_rounding(dtype):
    source = torch.Generator().manual_seed(9)
    q, latent = torch.randn(4, 24, generator=source), torch.randn(31, 24, generator=source)
    exact, lse = reference_attend.attend(q, latent, 0.2, 16)
    good = exact.to(dtype)
    assert check_attention(0, good, lse.float(), q, latent, 0.2) is None
    assert check_attention(0, good, None, q, latent, 0.2) is None
    wrong = good.clone()
    wrong[2, 5] += 4 * torch.finfo(dtype).eps * good[2, 5].abs() + 1e-4
    assert "element [2, 5]" in str(check_attention(0, wrong, lse.float(), q, latent, 0.2))
    assert "lse" in str(check_attention(0, good, lse.float() * 1.4427, q, latent, 0.2))
    assert "lse" in str(check_attention(0, good, torch.full_like(lse, torch.inf).float(), q, latent, 0.2))
    wrong[2, 5] = torch.nan
    assert "NaN in other places" in str(check_attention(0, wrong, lse.float(), q, latent, 0.2))


def test_an_empty_row_must_be_exactly_empty():
    q, none = torch.ones(2, 6), torch.ones(0, 6)
    zero, lse = torch.zeros(2, 4), torch.full((2,), -torch.inf)
    assert check_attention(0, zero, lse, q, none, 1.0) is None
    assert check_attention(0, zero + 1e-30, lse, q, none, 1.0) is not None
    assert check_attention(0, zero, lse.clamp(min=-1e30), q, none, 1.0) is not None


@pytest.mark.parametrize("geometry", [PLAIN, FP8, FNUZ], ids=str)
@pytest.mark.parametrize("score_set", SCORE_SETS, ids=lambda score_set: score_set.__name__)
def test_score_sets_become_keys_with_exactly_those_scores(geometry, score_set):
    values = score_set(300, torch.Generator().manual_seed(2))
    assert values.dtype == torch.float32
    if geometry.index.rule is not None and values.isinf().any():
        return  # no fp8 key scores infinity
    keys = keys_with(values, 64, geometry.index)
    rounded = keys[:, 0]
    assert torch.equal(rounded.isnan(), values.isnan())
    assert ((rounded - values).abs() <= values.abs() * 2.0**-4)[values.isfinite()].all()
    index_q, weights = asking(1, 4, 64, geometry.index.encoding)
    for s in (*range(0, 300, 37), 299):
        coded = encode_row(keys[s], geometry.index)
        if geometry.index.rule is None:
            stored, scale = torch.frombuffer(bytearray(coded["values"]), dtype=torch.bfloat16).double(), 1.0
        else:
            dtype = index_q.dtype
            stored = torch.frombuffer(bytearray(coded["values"]), dtype=torch.uint8).view(dtype).double()
            scale = torch.frombuffer(bytearray(coded["scale"]), dtype=torch.float32).double().item()
        got = reference_select.scores(index_q[0], weights[0], stored.unsqueeze(0), torch.tensor([scale]))
        wanted = rounded[s].double().unsqueeze(0)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_score_sets_of_no_length():
    for score_set in SCORE_SETS:
        assert score_set(1, torch.Generator().manual_seed(1)).shape == (1,)


def test_the_geometry_cases_hold_every_size_twice():
    tested = [case for case in CASES if case.name.startswith("sized")]
    geometries = grid._grid()
    assert len(tested) >= len(geometries) >= 30
    for name, wanted in (
        ("num_heads", grid.HEADS),
        ("index_n_heads", grid.INDEX_HEADS),
        ("index_head_dim", grid.INDEX_DIMS),
        ("index_topk", grid.TOPKS),
        ("qk_rope_head_dim", (0, 64)),
    ):
        counts = [getattr(geometry.dims, name) for geometry in geometries]
        assert all(counts.count(value) >= 2 for value in wanted), name
    assert {geometry.block_size for geometry in geometries} == {1, 16, 33, 64, 1280}
    encodings = {(geometry.dtype, geometry.latent.encoding) for geometry in geometries}
    assert encodings >= {("bf16", "bf16"), ("f16", "f16"), ("f32", "f32"), ("bf16", "fp8"), ("bf16", "fp8fnuz")}


def test_cases_have_distinct_names_known_tags_and_a_group_for_each_clause():
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.tag for case in CASES} == set(TAGS)
    assert {case.clause for case in CASES} == {f"C{number}" for number in range(1, 10)} | {"C11"}
    for clause in {case.clause for case in CASES}:
        assert any(case.clause == clause and case.tag == "ci" for case in CASES)


def test_geometry_names_are_distinct():
    names = [geometry.name for geometry in (*SMALL, *MODELS)]
    assert len(set(names)) == len(names)


ROW = next(row for row in TABLE if row.name == "eager" and row.stage == Stage.SELECT)
ROWS = (ROW, next(row for row in TABLE if row.name == "eager" and row.stage == Stage.ATTEND))


class Holder:
    row = ROW


def test_a_candidate_gets_eager_for_the_stages_that_it_does_not_serve():
    strange = replace(ROW, name="strange")
    candidate = Candidate.of("strange", [strange])
    plan = candidate.plan(PLAIN.problem(max_num_tokens=4, max_num_requests=1, max_model_len=8))
    assert [stage.row.name for stage in plan.stages.values()] == ["eager", "strange", "eager"]
    declined = Candidate.of("strange", [replace(strange, requires=Requires(archs=("sm90",)))])
    with pytest.raises(Exception, match="needs sm90, got cpu"):  # eager's select does not step in
        declined.plan(PLAIN.problem(max_num_tokens=4, max_num_requests=1, max_model_len=8))


def test_rows_from_outside():
    assert from_outside(f"{__name__}:ROW").own == (ROW,)
    assert from_outside(f"{__name__}:ROWS").own == ROWS
    assert from_outside(f"{__name__}:Holder.row").own == (ROW,)
    assert from_outside(f"{__name__}:ROW").name == f"{__name__}:ROW"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_module:ROW", "No module named 'no_such_module'"),
        (f"{__name__}:MISSING", "MISSING"),
        (f"{__name__}:Holder", "at most one for each stage, got type"),
        (f"{__name__}:NAMES", "at most one for each stage, got tuple"),
        (f"{__name__}:DOUBLE", "at most one for each stage, got tuple"),
        (f"{__name__}:EMPTY", "at most one for each stage, got tuple"),
    ],
)
def test_what_is_not_a_row_is_one_clear_line(path, said):
    with pytest.raises(UsageError) as caught:
        from_outside(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


DOUBLE, EMPTY = (ROW, ROW), ()


def test_rows_by_name_and_rows_that_resolve():
    assert {row.stage for row in from_table("eager").own} == set(Stage)
    with pytest.raises(UsageError, match=r"needs eager.*'nobody'"):
        from_table("nobody")
    found = resolving(PLAIN.problem(max_num_tokens=4, max_num_requests=1, max_model_len=8))
    assert "eager" in [candidate.name for candidate in found]


def test_the_meter_counts_peaks_and_not_sums():
    def one_after_the_other():
        for _ in range(5):
            torch.empty(1 << 20, dtype=torch.uint8)

    def together():
        return [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(5)]

    assert (1 << 20) <= peak_bytes(one_after_the_other) < (2 << 20)
    assert (5 << 20) <= peak_bytes(together) < (6 << 20)
    before = torch.empty(1 << 20, dtype=torch.uint8)
    assert peak_bytes(lambda: before.fill_(1)) < 1 << 16
