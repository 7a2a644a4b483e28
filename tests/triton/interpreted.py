"""Runs conformance cases on the Triton kernels in Triton's interpreter; a process of its own, because kernels choose
between interpreter and compiler when they are imported. Prints the cases that passed; fails with the first that does not.

Geometries are in fp16 and fp32: the interpreter multiplies and rounds bf16 wrongly.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import torch
import triton
import triton.language as tl
from disagreeing import Reordered, Silent, agree

from sparse_mla.backends.table import TABLE
from sparse_mla.backends.triton import scratch
from sparse_mla.backends.triton.pick import nth_largest
from sparse_mla.backends.triton.select import Select
from sparse_mla.cache import index_fp8, plain
from sparse_mla.device import Device
from sparse_mla.testing.candidates import Candidate
from sparse_mla.testing.conformance import empty, layout
from sparse_mla.testing.conformance.rows import prompts_of
from sparse_mla.testing.geometries import plain_caches, sizes
from sparse_mla.testing.lane import Lane, Span, demand_reference, new_layer

HALF = plain_caches("half", sizes(3, 4, 24), "f16")
FP8 = replace(plain_caches("index-fp8", sizes(2, 4, 24), "f16"), index=index_fp8(64))
FNUZ = replace(FP8, name="index-fnuz", index=index_fp8(64, encoding="fp8fnuz"))


def candidate():
    own = [replace(row, requires=replace(row.requires, archs=("cpu",))) for row in TABLE if row.name == "triton"]
    return Candidate.of("triton", own)


def few_candidates():
    """Sampled limits from the hundredth key on, which cut for real."""
    scratch._LEAST_CANDIDATES = 64
    scratch._LEAST_STRIDE = 4


def bad_limits():
    """Limits that let one key pass: every sampled row takes the exact path."""
    few_candidates()
    scratch.candidates = lambda topk: 64
    scratch.sample_rank = lambda problem: 1


def write_bytes(judged):
    layout.not_a_number(judged, FP8)
    layout.not_a_number(judged, FNUZ)


def index_lists(judged):
    empty.index_lists(judged, HALF)


def ties_and_limits(judged):
    few_candidates()
    prefill(judged, FP8)


def exact_path(judged):
    bad_limits()
    prefill(judged, FP8)


def padding_junk(judged):
    empty.padding_junk(judged, HALF)


def agreement(judged):
    """The score kernels agree; where one adds in another order, or keeps nothing, that is noticed."""
    del judged
    device = Device.named("cpu")
    for geometry in (FP8, replace(FP8, index=plain(64, "f32"))):
        problem = geometry.problem(max_num_tokens=128, max_num_requests=128, max_model_len=512)
        for kind, same in ((Select, True), (Reordered, False), (Silent, False)):
            if agree(kind, problem, device, torch.device("cpu")) != same:
                raise AssertionError(f"{geometry.index.encoding}: {kind.__name__} does not give {same}")


@triton.jit
def searched(keys, counts, out, SIZE: tl.constexpr):
    key = tl.load(keys + tl.arange(0, SIZE)).to(tl.uint32, bitcast=True)
    for number in range(SIZE):
        tl.store(out + number, nth_largest(key, tl.load(counts + number)).to(tl.int32, bitcast=True))


def search(judged):
    """The n-th largest key, for every n: sparse, dense, tied, adjacent keys, and the largest that a score can have."""
    del judged
    size, draw = 64, random.Random(0)
    kinds = (
        [draw.randrange(1 << 32) for _ in range(size)],
        [draw.randrange(1, 5) for _ in range(size)],
        [0] * 20 + [0xFF800000] * 4 + [draw.randrange(0xBF800000, 0xBF800040) for _ in range(size - 24)],
        [7] * size,
        [0] * size,
    )
    for keys in kinds:
        ordered = sorted(keys, reverse=True)
        counts = [min(number + 1, sum(key > 0 for key in keys)) for number in range(size)]
        stored = torch.tensor(keys).to(torch.uint32).view(torch.int32)
        found = torch.empty(size, dtype=torch.int32)
        searched[(1,)](stored, torch.tensor(counts, dtype=torch.int32), found, SIZE=size)
        wanted = [ordered[count - 1] if count else 0 for count in counts]
        if (found.long() & 0xFFFFFFFF).tolist() != wanted:
            raise AssertionError(f"{keys}: {found}")


def prefill(judged, geometry):
    """Two prompts whose scores tie, in one call and in fast mode: some rows of them against the reference."""
    prompts = prompts_of(geometry, "tied", (84, 18))
    layer = new_layer(geometry, prompts)
    problem = geometry.problem(max_num_tokens=64, max_num_requests=2, max_model_len=128, deterministic=False)
    lane = Lane(judged, problem)
    spans = [Span(0, 0, 64), Span(0, 64, 84), Span(1, 0, 18)]
    lane.write(layer, spans[:1])
    lane.write(layer, spans[1:])
    for span, answer in zip(spans[1:], lane.read(layer, spans[1:], padding=2), strict=True):
        some = [0, span.size // 2, span.size - 1]
        demand_reference(layer, span.request, answer.at(some), [span.start + row for row in some], exact=True)


GROUPS = (search, write_bytes, index_lists, padding_junk, agreement, ties_and_limits, exact_path)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for group in GROUPS:
        if group.__name__ in sys.argv[1:]:
            group(candidate())
            print(group.__name__)
