"""Selections of an engine against Transformers' scores: only rounding excuses a difference."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.reference import select as reference
from sparse_mla.verify.transformers_child import Judge

ROWS, TOPK = 40, 6


def scores():
    values = torch.randn(1, ROWS, ROWS, generator=torch.Generator().manual_seed(5))
    return values.masked_fill(~torch.ones(ROWS, ROWS, dtype=torch.bool).tril(), torch.finfo(torch.float32).min)


def indices_of(values):
    rows = torch.full((ROWS, TOPK), -1, dtype=torch.int32)
    for row in range(ROWS):
        best = reference.top(values[0, row, : row + 1].double(), TOPK)
        rows[row, : best.numel()] = best.int()
    return rows


def judged(values, indices):
    judge = Judge(0, {"indices": indices}, by_reference=False)
    return judge, judge.topk(values, TOPK)


def test_equal_selections_pass():
    values = scores()
    judge, answer = judged(values, indices_of(values))
    assert (judge.wrong, judge.near_ties) == ("", 0)
    assert answer.indices.shape == (1, ROWS, TOPK)
    assert int(answer.indices.min()) == 0


def test_scores_within_rounding_leave_the_choice_to_the_engine():
    values, row = scores(), 30
    order = values[0, row, : row + 1].sort(descending=True)
    kth, following = order.indices[TOPK - 1], order.indices[TOPK]
    values[0, row, following] = values[0, row, kth] - 1e-6
    indices = indices_of(values)
    chosen = [*indices[row].tolist(), int(following)]
    chosen.remove(int(kth))
    indices[row] = torch.tensor(sorted(chosen))
    judge, answer = judged(values, indices)
    assert (judge.wrong, judge.near_ties) == ("", 1)
    assert answer.indices[0, row].tolist() == sorted(chosen)


@pytest.mark.parametrize(
    "wrong", [[0, 1, 2, 3, 4, 5], [-1] * TOPK, [25, 26, 27, 28, 29, 31]], ids=["first", "none", "future"]
)
def test_any_other_difference_is_named(wrong):
    values = scores()
    indices = indices_of(values)
    indices[30] = torch.tensor(wrong)
    judge, _ = judged(values, indices)
    assert judge.wrong.startswith("layer 0: row 30: positions")


def test_the_reference_judges_from_the_engines_own_bytes():
    source = torch.Generator().manual_seed(1)
    index_q, keys = torch.randn(ROWS, 2, 8, generator=source), torch.randn(ROWS, 8, generator=source).double()
    weights, scale = torch.rand(ROWS, 2, generator=source), torch.ones(ROWS, dtype=torch.float64)
    rows = torch.full((ROWS, TOPK), -1, dtype=torch.int32)
    for row in range(ROWS):
        seen = reference.scores(index_q[row], weights[row], keys[: row + 1], scale[: row + 1])
        best = reference.top(seen, TOPK)
        rows[row, : best.numel()] = best.int()
    engine = {"indices": rows, "index_q": index_q, "index_weights": weights, "keys": keys, "scale": scale}
    right = Judge(1, engine, by_reference=True)
    right.topk(scores(), TOPK)
    assert right.wrong == ""
    spoiled = rows.clone()
    spoiled[20] = torch.arange(TOPK)
    wrong = Judge(1, engine | {"indices": spoiled}, by_reference=True)
    wrong.topk(scores(), TOPK)
    assert wrong.wrong.startswith("layer 1: selected indices differs at row 20")
