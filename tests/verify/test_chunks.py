"""Chunk plans cover a prompt exactly, and the rows looked at are the ones that reports promise."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.backends.triton.tuning import DECODE_THRESHOLD
from sparse_mla.verify.chunks import MARGIN, chunk_plans, query_rows

SIZES = (8_192, 12_288, 21_504)


def rows_of(plans, **changes):
    given_ = {
        "topk": 2048,
        "block_size": 64,
        "seed": 0,
        "pages": 32,
        "sampled": 256,
        "referenced": 12,
        "complete": False,
        "strict": True,
    }
    return query_rows(plans, **(given_ | changes))


@settings(max_examples=60)
@given(
    st.integers(1, 60_000),
    st.lists(st.integers(1, 30_000), max_size=4),
    st.integers(0, 3),
    st.integers(0, 9),
    st.booleans(),
)
def test_calls_cover_every_token_once(length, sizes, decoded, seed, strict):
    plans = chunk_plans(length, decoded, sizes, seed=seed, strict=strict)
    assert len({plan.name for plan in plans}) == len(plans) or len(set(sizes)) < len(sizes)
    for plan in plans:
        calls = list(plan.calls())
        assert calls[0][0] == 0
        assert calls[-1][1] == length + decoded
        assert all(start < stop for start, stop in calls)
        assert all(before[1] == after[0] for before, after in pairwise(calls))


@settings(max_examples=60)
@given(st.integers(200, 40_000), st.integers(20, 20_000), st.integers(0, 9))
def test_fast_mode_never_looks_at_so_few_rows_of_a_prefill_call_that_they_count_as_decode(length, size, seed):
    plans = chunk_plans(length, 4, (size,), seed=seed, strict=False)
    looked_at = sorted(rows_of(plans, seed=seed, strict=False, sampled=0, pages=1).query)
    for plan in plans:
        for start, stop in plan.calls():
            if start < length:
                assert bisect_left(looked_at, stop) - bisect_left(looked_at, start) > DECODE_THRESHOLD


@pytest.mark.parametrize("length", [20_000, 40_000, 60_000, 80_000, 100_000])
def test_the_default_sweep_counts_chunks(length):
    plans = {plan.name: plan for plan in chunk_plans(length, 4, SIZES, seed=0, strict=True)}
    prefill = [stop for _, stop in plans["8,192 tokens"].calls() if stop <= length]
    assert len(prefill) == -(-length // 8_192) >= 3
    assert plans["8,192 tokens, fresh objects"].fresh
    assert plans["12,288 tokens"].beside
    assert ("21,504 tokens" in plans) == (length > 21_504)
    assert len(plans["one call"].ends) == 1
    assert len(plans["short extends"].ends) >= 10


def test_decode_is_part_of_one_prefill_only_where_bits_are_promised():
    strict, fast = (chunk_plans(300, 2, (100,), seed=0, strict=strict) for strict in (True, False))
    assert strict[0].ends == (302,)
    assert fast[0].ends == (300, 301, 302)
    assert "short extends" not in {plan.name for plan in fast}


def test_every_boundary_is_looked_at_from_both_sides():
    plans = chunk_plans(20_000, 4, SIZES, seed=3, strict=True)
    rows = rows_of(plans)
    total = 20_004
    edges = {end for plan in plans for end in plan.ends} | {2048, *rows.pages}
    wanted = {row for edge in edges for row in range(edge - MARGIN, edge + MARGIN) if 0 <= row < total}
    assert wanted <= set(rows.query)
    assert len(set(rows.query) - wanted - {0, total - 1}) == 256
    assert len(rows.pages) == 32
    assert all(page % 64 == 0 for page in rows.pages)
    chunk_edges = {end for plan in plans for end in plan.ends}
    assert {row for edge in chunk_edges for row in (edge - 1, edge) if row < total} <= set(rows.reference)
    assert {0, total - 1} <= set(rows.reference) <= set(rows.query)


def test_at_a_million_tokens_the_reference_judges_both_sides_of_sixty_boundaries():
    plans = chunk_plans(1_000_000, 4, SIZES, seed=1, strict=True)
    rows = rows_of(plans)
    ends, judged = {end for plan in plans for end in plan.ends}, set(rows.reference)
    both = sorted(end for end in ends if {end - 1, end} <= judged)
    assert len(ends) > 200
    assert len(both) in (59, 60)  # the last end has no row behind it
    assert max(b - a for a, b in pairwise([0, *both, 1_000_004])) < 60_000
    assert {0, 2047, 2048, 1_000_003} <= judged
    assert len(judged) < 170


@pytest.mark.parametrize("total_length", [1, 5, 63, 64, 65, 700])
def test_short_prompts_are_looked_at_in_full(total_length):
    rows = rows_of(chunk_plans(total_length, 0, (64,), seed=0, strict=True), sampled=1000)
    assert rows.query == tuple(range(total_length))
    assert rows.complete


def test_where_boundaries_leave_no_row_to_draw_all_are_looked_at():
    """Chunks of 16 tokens: every token lies within 8 of a boundary."""
    rows = rows_of(chunk_plans(700, 0, (16,), seed=0, strict=True), sampled=100)
    assert rows.query == tuple(range(700))
    assert rows.complete


def test_seed_changes_what_is_drawn_and_nothing_else_does():
    plans = chunk_plans(20_000, 4, SIZES, seed=0, strict=True)
    assert rows_of(plans) == rows_of(plans)
    assert rows_of(plans).pages != rows_of(plans, seed=1).pages
    assert rows_of(plans, complete=True).query == tuple(range(20_004))
    assert rows_of(plans, complete=True).reference == rows_of(plans).reference


def test_a_position_is_located_in_its_call():
    (plan,) = (plan for plan in chunk_plans(300, 1, (100,), seed=0, strict=True) if plan.name == "100 tokens")
    assert plan.locate(0) == "call 1 of 4, its token 0"
    assert plan.locate(200) == "call 3 of 4, its token 0"
    assert plan.locate(300) == "call 4 of 4, its token 0"
