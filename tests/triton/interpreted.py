"""Runs conformance cases on the Triton kernels in Triton's interpreter; a process of its own, because kernels choose
between interpreter and compiler when they are imported. Prints the cases that passed; fails with the first that does not.

Geometries are in fp16 and fp32: the interpreter multiplies and rounds bf16 wrongly.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch
import triton
import triton.language as tl
from disagreeing import Reordered, Silent, agree

from sparse_mla.backends.table import TABLE
from sparse_mla.backends.triton import scratch, select
from sparse_mla.backends.triton.attend import Attend
from sparse_mla.backends.triton.gather_ceiling import ways_to_gather
from sparse_mla.backends.triton.pick import nth_largest
from sparse_mla.backends.triton.scores import sampled_position
from sparse_mla.backends.triton.select import Select
from sparse_mla.backends.triton.tuning import attend_split
from sparse_mla.batch import BatchLayout
from sparse_mla.cache import CacheView, index_fp8, plain
from sparse_mla.device import Device
from sparse_mla.testing.candidates import Candidate
from sparse_mla.testing.compare import check_attention
from sparse_mla.testing.conformance import empty, layout, selection
from sparse_mla.testing.conformance.rows import prompts_of
from sparse_mla.testing.geometries import plain_caches, sizes
from sparse_mla.testing.lane import Lane, Span, demand_reference, new_layer
from sparse_mla.testing.scores import infinities, levels, recent, some_nan
from sparse_mla.workspace import Workspace, packed_bytes

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
    """Limits that let few keys pass: every sampled row takes the exact path."""
    few_candidates()
    select.sample_rank = lambda problem: 1


def write_bytes(judged):
    layout.not_a_number(judged, FP8)
    layout.not_a_number(judged, FNUZ)


def index_lists(judged):
    empty.index_lists(judged, HALF)


def hard_scores(judged):
    """Hard scores, cut by a sampled limit or by the exact path; and how many rows saw only NaN."""
    few_candidates()
    selection.nan_query(judged, FP8)
    for seed, score_set in enumerate((levels, recent, some_nan, infinities)):
        geometry, values = selection.with_topk(FP8, 24), score_set(300, torch.Generator().manual_seed(seed))
        selection.demand_exact(*selection.scored(judged, geometry, values), [40, 130, 299], score_set.__name__)


def ties_and_limits(judged):
    few_candidates()
    rows, failed = prefill(judged, FP8)
    assert 0 <= failed < rows, f"{failed} of {rows} rows failed: no limit held"


def exact_path(judged):
    bad_limits()
    rows, failed = prefill(judged, FP8)
    assert failed == rows > 0, f"only {failed} of {rows} rows took the exact path"


def padding_junk(judged):
    empty.padding_junk(judged, HALF)


def segments(judged):
    """Lists of several tiles and segments, with gaps: right, and with the same bits split over programs and in one."""
    del judged
    for heads, units, strict in ((3, 16, True), (40, 32, True), (40, 48, False)):
        device = replace(Device.named("cpu"), units=units)
        geometry = plain_caches("long lists", sizes(heads, 2, 600), "f16")
        problem = geometry.problem(max_num_tokens=32, max_num_requests=32, max_model_len=1024, deterministic=strict)
        attend = Attend(problem, device)
        assert attend_split(problem, device).rows == 8
        workspace = Workspace()
        specs = scratch.attend_buffers(problem, device, 0)
        workspace.reserve(packed_bytes(specs))
        torch.manual_seed(heads)
        cache = torch.randn(16, 64, geometry.dims.head_dim).half()
        view = CacheView.of(cache.view(torch.uint8), geometry.latent)
        table = torch.randperm(16, dtype=torch.int32)[None]
        rows = cache[table[0].long()].reshape(1024, -1)
        query = torch.randn(9, heads, geometry.dims.head_dim).half()
        cache[0, 0] = torch.nan  # where a careless load would go; nobody selects it
        others = (table[0].long() * 64).repeat_interleave(64).add(torch.arange(1024) % 64).nonzero()[:, 0].int()
        lists = torch.stack([others[torch.randperm(1023)[:600]] for _ in range(9)])
        for row, kept in enumerate((600, 0, 1, 31, 256, 257, 512, 513)):
            lists[row, torch.randperm(600)[kept:]] = -1
        answers = []
        for count in (8, 9):  # split over programs, and each row in one
            asked = BatchLayout.build(
                query_lens=[1] * count, seq_lens=[1024] * count, block_table=table.expand(count, 16)
            )
            out, lse = torch.full((count, heads, 512), 7.0).half(), torch.full((count, heads), 7.0)
            poisoned = workspace.views(specs)
            for buffer in poisoned.values():
                buffer.fill_(-1)
            attend(query[:count], view, lists[:count], asked, 0.05, out, lse, poisoned)
            answers.append((out[:8], lse[:8]))
        for mine, other in zip(*answers, strict=True):
            if not torch.equal(mine, other):
                raise AssertionError(f"{heads} heads: splitting a list changes bits")
        for row, chosen in enumerate(lists[:8].long()):
            latent = rows[chosen[chosen >= 0]]
            wrong = check_attention(
                row, answers[0][0][row], answers[0][1][row], query[row], latent, 0.05, matrix_units=True
            )
            if wrong is not None:
                raise AssertionError(f"{heads} heads: {wrong}")


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


@triton.jit
def sampled(out, seed, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    number = tl.arange(0, SIZE)
    tl.store(out + number, sampled_position(number, seed, STRIDE))


def samples(judged):
    """One key of each stride is sampled, every place as often as others, and who knows one seed cannot tell with another. The
    script that makes scores against the sample knows its places: else its bound would hold for nothing.
    """
    del judged
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    from distributions import sampled_keys

    size, stride = 4096, 32
    places = []
    for seed in (0, 1, 2**31 - 1, 12345):
        found = torch.empty(size, dtype=torch.int32)
        sampled[(1,)](found, seed, SIZE=size, STRIDE=stride)
        assert torch.equal(found.long(), sampled_keys(size * stride, stride, seed)), f"seed {seed}: {found}"
        places.append(found % stride)
        counts = places[-1].bincount(minlength=stride)
        assert (abs(counts - size / stride) < 6 * (size / stride) ** 0.5).all(), f"seed {seed}: {counts}"
    for one, other in combinations(places, 2):
        for shift in range(stride):  # not even up to a shift
            same = int(((one + shift) % stride == other).sum())
            assert abs(same - size / stride) < 6 * (size / stride) ** 0.5, f"{same} of {size} alike"


def gathered(judged):
    """The bench's ceiling for gathering rows reads all rows that are listed."""
    del judged
    rows = torch.randint(-1000, 1000, (50, 288), dtype=torch.int32)
    listed = torch.randint(0, 50, (2, 128), dtype=torch.int32)
    for way in ways_to_gather(rows, listed):
        way()
        assert torch.equal(way.args[-1], rows[listed.long()].sum(1, dtype=torch.int32))


def prefill(judged, geometry):
    """Two prompts whose scores tie, in one call and in fast mode, against the reference; how many rows got a limit, and how
    many of those failed.
    """
    prompts = prompts_of(geometry, "tied", (300, 18))
    layer = new_layer(geometry, prompts)
    problem = geometry.problem(max_num_tokens=64, max_num_requests=2, max_model_len=320, deterministic=False)
    lane = Lane(judged, problem)
    for start in range(0, 300, 60):
        lane.write(layer, [Span(0, start, start + 60)])
    seen, plain_path = [], Select._pick_failed

    def noted(self, run, inputs, longest, results, buffers):
        seen.append(int(buffers["failed"][0]))
        plain_path(self, run, inputs, longest, results, buffers)

    Select._pick_failed = noted
    spans = [Span(0, 276, 300), Span(1, 0, 18)]
    lane.write(layer, spans[1:])
    for span, answer in zip(spans, lane.read(layer, spans, padding=2), strict=True):
        demand_reference(layer, span.request, answer, range(span.start, span.stop), exact=True)
    return spans[0].size, sum(seen)  # all of the first prompt's rows see more keys than candidates


GROUPS = (
    search,
    samples,
    gathered,
    write_bytes,
    index_lists,
    padding_junk,
    segments,
    agreement,
    hard_scores,
    ties_and_limits,
    exact_path,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for group in GROUPS:
        if group.__name__ in sys.argv[1:]:
            if group is not index_lists:  # nothing compiles here, and once is enough
                Select.warm_up = Attend.warm_up = lambda self, where: None
            group(candidate())
            print(group.__name__)
