"""C1: a query token's bits depend on its own query, its request's keys up to it, the geometry and the build: on no more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations
from random import Random
from typing import TYPE_CHECKING

import torch

from ..geometries import FNUZ, FP8, FULL, GLM_TP4, GLM_TP4_FP8, ODD, PLAIN, SMALL, Geometry
from ..inputs import Prompt, scattered_blocks
from ..lane import Asked, Lane, Layer, Rows, Span, demand_same, layers_in_one, new_layer, one_shot, whole
from .case import variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..candidates import Candidate

LENGTHS = (131, 50, 23)
MAX_EXTEND = 16
"""Query tokens of a decoding request at most: in fast mode, calls up to that may take other tiles."""


def prompts_of(geometry: Geometry, kind: str, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[Prompt]:
    """One prompt for each length."""
    return [
        Prompt(dims=geometry.dims, length=length, seed=seed + 7 * number, kind=kind, dtype=geometry.dtype)
        for number, length in enumerate(lengths)
    ]


def lane_for(candidate: Candidate, geometry: Geometry, *, deterministic: bool = True) -> Lane:
    """A lane for a few hundred tokens of a few requests; larger than one_shot's, so that plans differ."""
    problem = geometry.problem(max_num_tokens=256, max_num_requests=8, max_model_len=1280, deterministic=deterministic)
    return Lane(candidate, problem)


def cut(lengths: Sequence[int], size: Callable[[], int], rng: Random) -> Iterator[list[Span]]:
    """Calls that bring every request to its end, ``size()`` tokens at a time, in a new order each time."""
    done = [0] * len(lengths)
    while done != list(lengths):
        spans = []
        for request in rng.sample(range(len(lengths)), len(lengths)):
            stop = min(done[request] + size(), lengths[request])
            spans.append(Span(request, done[request], stop))
            done[request] = stop
        yield spans


def demand_as_one_shot(candidate: Candidate, layer: Layer, spans: Sequence[Span], answers: Sequence[Rows]) -> None:
    """Each span's rows equal those of its prompt computed alone and at once."""
    for span, rows in zip(spans, answers, strict=True):
        alone = one_shot(candidate, layer.geometry, layer.prompts[span.request])
        demand_same(rows, alone.at(slice(span.start, span.stop)), f"{layer.geometry} {span} among {len(spans)}")


def chunks(candidate: Candidate, geometry: Geometry, kind: str) -> None:
    """Chunk size, chunk count, order and neighbours, on one long-lived object and on new ones."""
    rng, prompts, old = Random(3), prompts_of(geometry, kind), lane_for(candidate, geometry)
    plans = (lambda: 256, lambda: 64, lambda: 17, lambda: rng.choice((0, 1, 2, 7, 16, 40)))
    for number, size in enumerate(plans):
        new = lane_for(candidate, geometry)
        layer = new_layer(geometry, prompts, seed=number, where=candidate.where)
        for spans in cut([prompt.length for prompt in prompts], size, rng):
            padding = rng.choice((0, 1, 5))
            lane = rng.choice((old, new))
            demand_as_one_shot(candidate, layer, spans, lane.step(layer, spans, padding))


def order(candidate: Candidate, geometry: Geometry) -> None:
    """Every order of the requests of one call, and each alone."""
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    for size in (1, 3):
        for spans in permutations(whole(prompts), size):
            demand_as_one_shot(candidate, layer, spans, lane.read(layer, spans))


def placement(candidate: Candidate, geometry: Geometry, block_size: int, gap_bytes: int) -> None:
    """Block size, the pages' order, foreign memory between blocks."""
    here = replace(geometry, block_size=block_size)
    prompts, lane = prompts_of(geometry, "normal"), lane_for(candidate, here)
    layer = new_layer(here, prompts, seed=block_size, where=candidate.where, gap_bytes=gap_bytes)
    for spans in cut(LENGTHS, lambda: 60, Random(block_size)):
        answers = lane.step(layer, spans)
        demand_as_one_shot(candidate, replace(layer, geometry=geometry), spans, answers)


def cached_prefix(candidate: Candidate, geometry: Geometry) -> None:
    """A request whose first blocks another one wrote, and still reads."""
    size = geometry.block_size
    short, long = (replace(prompts_of(geometry, "normal")[0], length=length) for length in (5 * size, 7 * size + 3))
    lane = lane_for(candidate, geometry)
    layer = new_layer(geometry, [short, long], where=candidate.where)
    layer.table[1, :5] = layer.table[0, :5]
    lane.write(layer, [Span(0, 0, short.length)])
    spans = [Span(1, 4 * size + 1, long.length), Span(0, short.length - 2, short.length)]
    lane.write(layer, [Span(1, 5 * size, long.length)])
    demand_as_one_shot(candidate, layer, spans, lane.read(layer, spans))


def history(candidate: Candidate, geometry: Geometry) -> None:
    """What an object did before, and what its scratch holds."""
    prompts, lane = prompts_of(geometry, "tied"), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    others = prompts_of(geometry, "normal", (200, 1, 30, 16), seed=90)
    other = new_layer(geometry, others, seed=4, where=candidate.where)
    lane.write(layer, whole(prompts))
    lane.step(other, whole(others)[1:])
    lane.step(other, whole(others)[:1])
    for poison in (0x00, 0x7F, 0xFF):
        lane.poison = poison
        lane.read(other, [Span(2, 29, 30), Span(0, 100, 117)])
        demand_as_one_shot(candidate, layer, whole(prompts), lane.read(layer, whole(prompts)))


def extends(candidate: Candidate, geometry: Geometry) -> None:
    """1 to 16 tokens of several requests on a filled cache, as decode and speculative decode ask, equal to prefill."""
    prompts, lane = prompts_of(geometry, "normal", (90, 40, 20)), lane_for(candidate, geometry)
    layer = new_layer(geometry, prompts, where=candidate.where)
    lane.write(layer, whole(prompts))
    for count in range(1, MAX_EXTEND + 1):
        spans = [Span(0, 60, 60 + count), Span(2, 3, 3 + (count + 7) % 16), Span(1, 39 - count, 40 - count)]
        demand_as_one_shot(candidate, layer, spans, lane.read(layer, spans, padding=count % 3))


def two_layers(candidate: Candidate, geometry: Geometry) -> None:
    """Two layers in one allocation, block beside block, on one lane."""
    first = prompts_of(geometry, "normal")
    second = [replace(prompt, seed=prompt.seed + 1000) for prompt in first]
    table, num_blocks = scattered_blocks(LENGTHS, geometry.block_size, seed=2)
    layers = layers_in_one(geometry, [first, second], table.to(candidate.where), num_blocks)
    lane = lane_for(candidate, geometry)
    for spans in cut(LENGTHS, partial(Random(5).choice, (1, 30, 31)), Random(5)):
        for layer in layers:
            demand_as_one_shot(candidate, layer, spans, lane.step(layer, spans))


def some_rows(candidate: Candidate, geometry: Geometry, kind: str, length: int, count: int) -> None:
    """A few query rows of a long prompt: as a subset of one call, one by one, and by twos, all equal."""
    prompt = replace(prompts_of(geometry, kind)[0], length=length)
    lane = Lane(candidate, geometry.problem(max_num_tokens=length, max_num_requests=2, max_model_len=length))
    layer = new_layer(geometry, [prompt], where=candidate.where)
    for start in range(0, length, 4096):
        lane.write(layer, [Span(0, start, min(start + 4096, length))])
    drawn = {2 * number for number in Random(length).sample(range(length // 2), count)}
    pairs = sorted(drawn | {0, geometry.dims.index_topk // 2 * 2, 8190, length // 2 * 2 - 2} & set(range(length - 1)))
    positions = torch.tensor([position + step for position in pairs for step in (0, 1)])
    asked = Asked(*map(torch.cat, zip(*(layer.asked([Span(0, at, at + 2)]) for at in pairs), strict=True)))
    batch = layer.batch(whole([prompt])).take(positions.to(candidate.where), [len(positions)])
    together = lane.ask(layer, batch, asked)
    for number, at in enumerate(pairs):
        two = lane.read(layer, [Span(0, at, at + 2)])[0]
        demand_same(two, together.at(slice(2 * number, 2 * number + 2)), f"{geometry} rows {at} and {at + 1}")
        one = lane.read(layer, [Span(0, at + 1, at + 2)])[0]
        demand_same(one, two.at(slice(1, 2)), f"{geometry} row {at + 1} alone")


def both_cores(candidate: Candidate, geometry: Geometry) -> None:
    """The clause holds whatever the number of CPU threads is, for as long as that stays."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    one_shot.cache_clear()
    try:
        chunks(candidate, geometry, "normal")
    finally:
        torch.set_num_threads(before)
        one_shot.cache_clear()


def default_mode(candidate: Candidate, geometry: Geometry) -> None:
    """Without strict mode everything holds that fast mode does not waive: calls of more tokens than a decode has."""
    lane = lane_for(candidate, geometry, deterministic=False)
    prompts = prompts_of(geometry, "normal", (128, 51, 34))
    whole_layer, layer = (new_layer(geometry, prompts, seed=seed, where=candidate.where) for seed in (1, 2))
    wanted = lane.step(whole_layer, whole(prompts))
    for spans in cut([128, 51, 34], lambda: MAX_EXTEND + 1, Random(6)):
        longer = [span for span in spans if span.size > MAX_EXTEND]
        for span, rows in zip(longer, lane.step(layer, longer), strict=True):
            demand_same(rows, wanted[span.request].at(slice(span.start, span.stop)), f"{geometry} {span}")


CASES = (
    *variants("C1", chunks, *((geometry, kind) for geometry in SMALL for kind in ("normal", "tied"))),
    *variants("C1", order, (PLAIN,), (ODD,)),
    *variants(
        "C1",
        placement,
        *((geometry, size, 0) for geometry in (PLAIN, FP8) for size in (1, 16, 33, 64, 1280)),
        (PLAIN, 16, 1152),
        (PLAIN, 33, 100),
        (FP8, 16, 60),
        (FNUZ, 33, 656),
        (ODD, 1, 4),
    ),
    *variants("C1", cached_prefix, (PLAIN,), (FP8,)),
    *variants("C1", history, (PLAIN,), (FP8,)),
    *variants("C1", extends, (PLAIN,), (FNUZ,), (ODD,)),
    *variants("C1", two_layers, (PLAIN,), (FP8,)),
    *variants("C1", some_rows, (PLAIN, "tied", 9000, 12), (FP8, "normal", 9000, 12)),
    *variants("C1", some_rows, (PLAIN, "tied", 20000, 60), (FP8, "normal", 40000, 60), tag=FULL),
    *variants("C1", some_rows, (GLM_TP4, "normal", 20000, 60), (GLM_TP4_FP8, "tied", 20000, 60), tag="bench"),
    *variants("C1", both_cores, (PLAIN,), (ODD,)),
    *variants("C1", default_mode, (PLAIN,), (FP8,)),
)
