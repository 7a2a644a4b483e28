"""C4: any geometry that a backend does not decline in its requirements; each against the reference, cut in two calls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...cache import plain
from ..geometries import (
    DEEPSEEK_TP8,
    FNUZ,
    FP8,
    FULL,
    GLM_TP4,
    GLM_TP4_FP8,
    PLAIN,
    Geometry,
    fp8_caches,
    plain_caches,
    sizes,
)
from ..lane import Lane, Span, demand_reference, new_layer
from .case import variants
from .rows import demand_as_one_shot, lane_for, prompts_of

if TYPE_CHECKING:
    from ..candidates import Candidate

HEADS = (1, 3, 8, 11, 16, 22, 64, 128)
INDEX_HEADS = (1, 2, 3, 4, 8, 32, 64)
INDEX_DIMS = (32, 64, 128)
TOPKS = (1, 2, 7, 16, 24, 64, 100, 2048)


def _grid() -> list[Geometry]:
    """Every value of every size at least twice, beside different others."""
    found = []
    for number in range(2 * len(HEADS) * 2):
        heads, index_heads = HEADS[number % len(HEADS)], INDEX_HEADS[(number * 3 + number // 8) % len(INDEX_HEADS)]
        index_dim, topk = INDEX_DIMS[number % 3], TOPKS[(number * 5 + number // 8) % len(TOPKS)]
        dims = sizes(heads, index_heads, topk, index_dim=index_dim, rope=64 * (number % 4 != 1))
        name = f"h{heads}-i{index_heads}x{index_dim}-k{topk}-r{dims.qk_rope_head_dim}"
        block_size = (16, 1, 64, 33, 1280)[number % 5]
        if number % 3 == 2:
            encoding = ("fp8", "fp8fnuz")[number // 3 % 2]
            found.append(fp8_caches(f"{name}-{encoding}", dims, encoding, block_size=block_size))
        else:
            dtype = ("bf16", "f32", "f16")[number // 4 % 3]
            found.append(plain_caches(f"{name}-{dtype}", dims, dtype, block_size=block_size))
    return found


OTHER_RANKS = (
    plain_caches("rank256", sizes(4, 2, 16, rank=256)),
    plain_caches("rank96", sizes(5, 5, 16, rank=96, rope=32), "f32"),
    plain_caches("rank1", sizes(1, 1, 1, rank=1, rope=1, index_dim=1), "f32"),
    fp8_caches("rank128", sizes(4, 2, 16, rank=128, rope=32)),
    fp8_caches("rank1024", sizes(2, 2, 16, rank=1024), "fp8fnuz"),
)
MIXED = (
    replace(FP8, name="fp8-f16", dtype="f16"),
    replace(FP8, name="fp8-f32", dtype="f32"),
    replace(PLAIN, name="bf16-latent-fp8-keys", index=FP8.index),
    replace(FP8, name="fp8-latent-f32-keys", index=plain(FP8.dims.index_head_dim, "f32")),
    replace(FNUZ, name="fnuz-latent-fp8-keys", index=FP8.index),
)
"""An engine chooses the two caches' formats one by one."""


def sized(candidate: Candidate, geometry: Geometry) -> None:
    """Prefill in two chunks beside another request, then decode: the reference's answer, and the one-shot bits."""
    lengths = (48, 21)
    prompts, lane = prompts_of(geometry, "normal", lengths, seed=17), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    for spans in ([Span(1, 0, 21), Span(0, 0, 30)], [Span(0, 30, 47)], [Span(0, 47, 48)]):
        answers = lane.step(layer, spans)
        demand_as_one_shot(candidate, layer, spans, answers)
        for span, rows in zip(spans, answers, strict=True):
            wanted = [position for position in range(span.start, span.stop) if position % 5 == 0 or position == 47]
            picked = rows.at([position - span.start for position in wanted])
            demand_reference(layer, span.request, picked, wanted, where=str(geometry))


def model_sized(candidate: Candidate, geometry: Geometry, length: int) -> None:
    """A real model's rank at a length where the sparse path is taken."""
    prompt = prompts_of(geometry, "normal", (length,))[0]
    lane = Lane(candidate, geometry.problem(max_num_tokens=1024, max_num_requests=1, max_model_len=length))
    layer = new_layer(geometry, [prompt], where=candidate.where)
    topk = geometry.dims.index_topk
    for start in range(0, length, 1024):
        lane.write(layer, [Span(0, start, min(start + 1024, length))])
    for at in (0, topk - 1, topk, topk + 1, length - 9):
        span = Span(0, at, min(at + 9, length))
        rows = lane.read(layer, [span])[0]
        demand_reference(layer, 0, rows, range(span.start, span.stop), where=str(geometry))


CASES = (
    *variants("C4", sized, *((geometry,) for geometry in (*_grid(), *OTHER_RANKS, *MIXED))),
    *variants("C4", model_sized, *((geometry, 2600) for geometry in (GLM_TP4, GLM_TP4_FP8, DEEPSEEK_TP8))),
    *variants("C4", model_sized, *((geometry, 20000) for geometry in (GLM_TP4, DEEPSEEK_TP8)), tag=FULL),
)
