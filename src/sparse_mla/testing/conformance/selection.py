"""C2: the index_topk best visible keys, exactly, ties to the lower position, ascending, −1 behind; NaN never."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ...cache import plain
from ...reference.write import decode_rows
from ..compare import check_selection, demand, require
from ..geometries import FNUZ, FP8, FULL, PLAIN, SMALL, Geometry
from ..inputs import slots_for
from ..lane import Asked, Lane, Layer, Span, new_layer, whole
from ..scores import (
    SCORE_SETS,
    all_equal,
    all_nan,
    asking,
    close,
    few_nonzero,
    hot_spans,
    infinities,
    keys_with,
    levels,
    mostly_nan,
    recent,
    some_nan,
)
from .case import variants
from .rows import lane_for, prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..candidates import Candidate

    ScoreSet = Callable[[int, torch.Generator], torch.Tensor]

F32 = replace(PLAIN, name="f32-keys", index=plain(64, "f32"))
KEYS = (F32, PLAIN, FP8, FNUZ)
COUNT = 700


def with_topk(geometry: Geometry, topk: int) -> Geometry:
    """The same sizes with another index_topk."""
    return replace(geometry, name=f"{geometry.name}-top{topk}", dims=replace(geometry.dims, index_topk=topk))


def scored(candidate: Candidate, geometry: Geometry, scores: torch.Tensor) -> tuple[Lane, Layer]:
    """A request whose keys have exactly these scores against ``asking``."""
    count = scores.numel()
    lane = Lane(candidate, geometry.problem(max_num_tokens=count, max_num_requests=2, max_model_len=count))
    prompt = replace(prompts_of(geometry, "normal")[0], length=count)
    layer = new_layer(geometry, [prompt], where=candidate.where)
    keys = keys_with(scores, geometry.dims.index_head_dim, geometry.index).to(candidate.where)
    slots = slots_for(layer.table[0].cpu(), geometry.block_size, 0, count).to(candidate.where)
    lane.operator.write_index(keys, layer.index, slots)
    return lane, layer


def demand_exact(lane: Lane, layer: Layer, positions: Sequence[int], where: str) -> int:
    """Rows that see up to each position must hold the reference's indices; how many of them saw only NaN."""
    geometry, dims = layer.geometry, layer.geometry.dims
    index_q, weights = asking(len(positions), dims.index_n_heads, dims.index_head_dim, geometry.index.encoding)
    unused = torch.zeros(len(positions), dims.num_heads, dims.head_dim)
    tokens = torch.tensor(positions, dtype=torch.int64, device=layer.table.device)
    batch = layer.batch(whole(layer.prompts)).take(tokens, [len(positions)])
    lane.operator.nan_rows.zero_()
    indices, lens = lane.select(layer, batch, Asked(index_q, weights, unused))
    keys, scale = decode_rows(layer.index, layer.slots(Span(0, 0, layer.prompts[0].length)).tolist())
    only_nan = 0
    for row, position in enumerate(positions):
        seen = slice(0, position + 1)
        fault = check_selection(row, indices[row], index_q[row], weights[row], keys[seen], scale[seen], exact=True)
        demand(fault, f"{where} position {position}")
        require(int(lens[row]) == int((indices[row] >= 0).sum()), f"{where}: topk_lens of position {position}")
        only_nan += bool((keys[seen, 0] * scale[seen]).isnan().all())
    got = int(lane.operator.nan_rows)
    require(got == only_nan, f"{where}: nan_rows is {got}, and {only_nan} rows saw only NaN")
    return only_nan


def exact(candidate: Candidate, geometry: Geometry, score_set: ScoreSet) -> None:
    """Every kind of score set at lengths around index_topk and beyond, for small and large index_topk."""
    for topk in (1, geometry.dims.index_topk, 257):
        here = with_topk(geometry, topk)
        values = score_set(COUNT, torch.Generator().manual_seed(topk))
        lane, layer = scored(candidate, here, values)
        around = {0, topk - 2, topk - 1, topk, topk + 1, 64, 511, 512, COUNT - 1}
        positions = sorted(position for position in around if 0 <= position < COUNT)
        demand_exact(lane, layer, positions, f"{here} {score_set.__name__}")


def topk_at_length(candidate: Candidate, geometry: Geometry, count: int) -> None:
    """index_topk of len − 1, len and len + 1."""
    for topk in sorted({max(count - 1, 1), count, count + 1}):
        here = with_topk(geometry, topk)
        lane, layer = scored(candidate, here, levels(count, torch.Generator().manual_seed(count)))
        demand_exact(lane, layer, [count - 1], f"{here} of {count}")


def wide(candidate: Candidate, geometry: Geometry, score_set: ScoreSet, count: int, topk: int) -> None:
    """Contexts where a backend cuts candidates by a sampled threshold, or passes a 16- or 18-bit count."""
    here = with_topk(geometry, topk)
    lane, layer = scored(candidate, here, score_set(count, torch.Generator().manual_seed(count)))
    positions = sorted({min(8191, count - 2), min(65536, count - 3), count - 1})
    demand_exact(lane, layer, positions, f"{here} {score_set.__name__} of {count}")


def nan_query(candidate: Candidate, geometry: Geometry) -> None:
    """NaN in one row's query makes that row's scores NaN and nobody else's."""
    lane, layer = scored(candidate, geometry, levels(200, torch.Generator().manual_seed(1)))
    dims = geometry.dims
    index_q, weights = asking(3, dims.index_n_heads, dims.index_head_dim, geometry.index.encoding)
    weights[1, 0] = torch.nan
    batch = layer.batch(whole(layer.prompts)).take(torch.arange(197, 200, device=layer.table.device), [3])
    lane.operator.nan_rows.zero_()
    indices, lens = lane.select(layer, batch, Asked(index_q, weights, torch.zeros(3, dims.num_heads, dims.head_dim)))
    require((indices[1] == -1).all() and int(lens[1]) == 0, "a row of NaN scores selected something")
    require(int(lane.operator.nan_rows) == 1, f"nan_rows is {int(lane.operator.nan_rows)}, wanted 1")
    require(lens[0] == lens[2] == dims.index_topk, "a NaN query reached another row")


def by_integers(candidate: Candidate, geometry: Geometry, kind: str) -> None:
    """Whole-number inputs through every head, where fp32 sums are exact in any order: indices equal the reference's."""
    lane, prompts = lane_for(candidate, geometry), prompts_of(geometry, kind, (140, 61))
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    batch, asked = layer.batch(whole(prompts)), layer.asked(whole(prompts))
    indices, _ = lane.select(layer, batch, asked)
    row = 0
    for request, prompt in enumerate(prompts):
        keys, scale = decode_rows(layer.index, layer.slots(Span(request, 0, prompt.length)).tolist())
        for seen in range(1, prompt.length + 1):
            q, weights = asked.index_q[row], asked.weights[row]
            demand(check_selection(row, indices[row], q, weights, keys[:seen], scale[:seen], exact=True), str(geometry))
            row += 1


def repeated(candidate: Candidate, geometry: Geometry) -> None:
    """Ten times the same call, massively tied: ranks of a tensor-parallel group must not differ."""
    lane, layer = scored(candidate, geometry, few_nonzero(600, torch.Generator().manual_seed(9)))
    answers = set()
    for _ in range(10):
        demand_exact(lane, layer, [598, 599], str(geometry))
        dims = geometry.dims
        index_q, weights = asking(600, dims.index_n_heads, dims.index_head_dim, geometry.index.encoding)
        asked = Asked(index_q, weights, torch.zeros(600, dims.num_heads, dims.head_dim))
        indices, _ = lane.select(layer, layer.batch(whole(layer.prompts)), asked)
        answers.add(indices.cpu().numpy().tobytes())
    require(len(answers) == 1, f"{len(answers)} different selections from ten equal calls")


CASES = (
    *variants(
        "C2",
        exact,
        *(
            (geometry, score_set)
            for geometry in KEYS
            for score_set in SCORE_SETS
            if score_set is not infinities or geometry.index.rule is None  # no fp8 key scores infinity
        ),
    ),
    *variants("C2", topk_at_length, *((geometry, count) for geometry in (F32, FP8) for count in (1, 2, 23, 64, 512))),
    *variants("C2", by_integers, *((geometry, kind) for geometry in SMALL for kind in ("integer", "tied"))),
    *variants("C2", nan_query, (PLAIN,), (F32,)),
    *variants("C2", repeated, (PLAIN,)),
    *variants(
        "C2",
        wide,
        *((F32, score_set, 9001, 300) for score_set in (all_equal, few_nonzero, close, recent, hot_spans, some_nan)),
        (PLAIN, levels, 20000, 2048),
        (FP8, hot_spans, 20000, 2048),
        (F32, all_nan, 9001, 4),
        (F32, mostly_nan, 9001, 4),
    ),
    *variants(
        "C2",
        wide,
        *((F32, score_set, 2**18 + 65, 2048) for score_set in SCORE_SETS),
        *((FP8, score_set, 2**16 + 3, 2048) for score_set in (all_equal, levels, recent, hot_spans)),
        tag=FULL,
    ),
)
