"""From sampled scores to limits, from candidates to the best, exact; and the path for rows whose limit failed.

A row's limit is a pair (score, position): a candidate passes with a better score, or with an equal one before the
position. So rows in which thousands of keys tie, even all of them, are cut as finely as any other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .encoding import ordered
from .launch import follow
from .scores import COUNTER_WORDS, SLICED, load_keys, load_row, row_scores, sampled_position

LAST = tl.constexpr(2**31 - 1)
RUNTIME = [
    "seed",
    "first_row",
    "query_stride",
    "weight_stride",
    "table_stride",
    "table_width",
    "block_stride",
    "scale_block_stride",
    "out_stride",
    "slot_words",
]


@triton.jit
def not_below(key, low, step):
    """Of each key, in 21 bits each, whether it is not below low + step, low + 2 step and low + 3 step: to be summed."""
    first, second, third = key >= low + step, key >= low + 2 * step, key >= low + 3 * step
    return first.to(tl.int64) + (second.to(tl.int64) << 21) + (third.to(tl.int64) << 42)


@triton.jit
def count_of(sums, number: tl.constexpr):
    """The sum over the ``number``-th of the three values of ``not_below``."""
    return ((sums >> (21 * number)) & 0x1FFFFF).to(tl.int32)


@triton.jit
def narrowed(low, high, step, first, second, third, wanted):
    """One step of a search in [low, high] for what parts the ``wanted`` largest keys from the rest.

    ``first``, ``second`` and ``third`` keys are not below low + step, low + 2 step and low + 3 step. Where these are just
    as many as wanted the search is over, though no key may have that value.
    """
    quarter = (first >= wanted).to(tl.uint32) + (second >= wanted).to(tl.uint32) + (third >= wanted).to(tl.uint32)
    exact = (first == wanted) | (second == wanted) | (third == wanted)
    found = low + quarter * step
    return found, tl.where(exact, found, tl.where(quarter == 3, high, found + step - 1))


@triton.jit
def nth_largest(key, count):
    """The ``count``-th largest of uint32 keys, as many of which are above 0; 0 if none is."""
    high = tl.max(key, 0)
    low = tl.min(tl.where(key > 0, key, high), 0)
    while low < high:
        step = ((high - low) >> 2) + 1
        sums = tl.sum(not_below(key, low, step), 0)
        low, high = narrowed(low, high, step, count_of(sums, 0), count_of(sums, 1), count_of(sums, 2), count)
    return tl.min(tl.where(key >= low, key, 0xFFFFFFFF), 0)


@triton.jit
def row_visible(requests, visible_lens, row, table_width, BLOCK_SIZE: tl.constexpr):
    """Request of a row and how many keys it sees; 0 for padding."""
    request = tl.load(requests + row)
    visible = tl.minimum(tl.load(visible_lens + row), table_width * BLOCK_SIZE)
    return request, tl.where(request < 0, 0, tl.maximum(visible, 0))


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def set_limits(
    requests,
    visible_lens,
    limits,
    limit_positions,
    kept,
    failed,
    pool,
    seed,
    first_row,
    table_width,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row: its limit is the RANK-th best of its sample; none if the sample is smaller.

    Also starts the counters: how many candidates each row keeps, and how many rows failed.
    """
    follow(EARLY)
    local = tl.program_id(0)
    _, visible = row_visible(requests, visible_lens, first_row + local, table_width, BLOCK_SIZE)
    tl.store(kept + local * COUNTER_WORDS, 0)
    if local == 0:
        tl.store(failed, 0)
    limit = tl.full((), float("-inf"), tl.float32)
    limit_position = tl.full((), LAST, tl.int32)
    if visible > CAPACITY:
        number = tl.arange(0, SAMPLES)
        position = sampled_position(number, seed, STRIDE)
        inside = position < visible
        score = tl.load(pool + local * SAMPLES + number, mask=inside, other=0.0)
        key = ordered(score, inside)
        if tl.sum((key > 0).to(tl.int32), 0) >= RANK:
            found = nth_largest(key, RANK)
            tie = key == found
            room = RANK - tl.sum((key > found).to(tl.int32), 0)
            limit = tl.max(tl.where(tie, score, float("-inf")), 0)
            within = tie & (tl.cumsum(tie.to(tl.int32), 0) <= room)
            limit_position = tl.max(tl.where(within, position, 0), 0) + 1
    tl.store(limits + local, limit)
    tl.store(limit_positions + local, limit_position)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def pick(
    requests,
    visible_lens,
    limit_positions,
    kept,
    failed,
    candidates,
    out,
    lens,
    nan_rows,
    first_row,
    table_width,
    out_stride,
    TOPK: tl.constexpr,
    TOPK_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program a row: the TOPK best of its candidates, ascending, then −1; or the row goes on the list of failed ones."""
    follow(EARLY)
    local = tl.program_id(0)
    row = (first_row + local).to(tl.int64)
    _, visible = row_visible(requests, visible_lens, row, table_width, BLOCK_SIZE)
    passed = tl.load(kept + local * COUNTER_WORDS)
    unlimited = tl.load(limit_positions + local) == LAST
    if (passed > CAPACITY) | ((passed < TOPK) & (unlimited == 0)):
        tl.store(failed + 1 + tl.atomic_add(failed, 1, sem="relaxed"), local)
        tl.store(lens + row, -1)
    else:
        slot = tl.arange(0, CAPACITY)
        inside = slot < passed
        word = tl.load(candidates + (local * CAPACITY + slot), mask=inside, other=0)
        key = ordered((word >> 32).to(tl.uint32).to(tl.float32, bitcast=True), inside)
        position = word.to(tl.int32)
        count = tl.minimum(tl.sum((key > 0).to(tl.int32), 0), TOPK)
        least = nth_largest(key, count)
        above = key > least
        tie = (key == least) & (key > 0)
        room = count - tl.sum(above.to(tl.int32), 0)
        if tl.sum(tie.to(tl.int32), 0) > room:  # ties go to the lower positions
            near = tl.where(tie, (position ^ 0x7FFFFFFF).to(tl.uint32), 0)
            tie = tie & (near >= nth_largest(near, room))
        taken = (above | tie).to(tl.int32)
        place = tl.cumsum(taken, 0) - taken
        line = out + row * out_stride
        tl.store(line + place, position, mask=taken > 0)
        tl.store(lens + row, count)
        tl.debug_barrier()  # stored positions are read by other threads
        slot = tl.arange(0, TOPK_PADDED)
        ascending = tl.sort(tl.load(line + slot, mask=slot < count, other=LAST))
        tl.store(line + slot, tl.where(slot < count, ascending, -1), mask=slot < TOPK)
        if (count == 0) & (visible > 0):
            tl.atomic_add(nan_rows, 1, sem="relaxed")


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def pick_failed(
    query,
    weights,
    values,
    scale,
    block_table,
    requests,
    visible_lens,
    failed,
    pool,
    out,
    lens,
    nan_rows,
    first_row,
    query_stride,
    weight_stride,
    table_stride,
    table_width,
    block_stride,
    scale_block_stride,
    out_stride,
    slot_words,
    TOPK: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ENCODING: tl.constexpr,
    QUERY_ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows whose limit let too few or too many pass: all scores of a row in a slot of the pool, and the best of them.

    Always started; without such rows its programs find an empty list and leave. A program has one slot, and takes every
    num_programs-th row.
    """
    follow(EARLY)
    program = tl.program_id(0)
    for item in range(program, tl.load(failed), tl.num_programs(0)):
        local = tl.load(failed + 1 + item)
        row = (first_row + local).to(tl.int64)
        request, visible = row_visible(requests, visible_lens, row, table_width, BLOCK_SIZE)
        asked, weight = load_row(
            query, weights, row, query_stride, weight_stride, HEADS, HEADS_PADDED, DIM, QUERY_ENCODING, OPERAND
        )
        slot = pool + program.to(tl.int64) * slot_words
        tl.debug_barrier()  # the slot may still be read for the row before
        for first in tl.range(0, visible, KEYS, num_stages=STAGES):
            position = first + tl.arange(0, KEYS)
            keys, key_scale = load_keys(
                values,
                scale,
                block_table + request.to(tl.int64) * table_stride,
                block_stride,
                scale_block_stride,
                position,
                position < visible,
                ROW_STRIDE,
                BLOCK_SIZE,
                DIM,
                UNIT,
                SCALED,
                ENCODING,
                OPERAND,
            )
            score = row_scores(keys, key_scale, asked, weight, HEADS, HEADS_PADDED, LEVELS)
            tl.store(slot + position, score, mask=position < visible)
        tl.debug_barrier()  # stored scores are read by other threads
        low, high, seen = extent(slot, visible, WIDTH)
        count = tl.minimum(seen, TOPK)
        while low < high:
            step = ((high - low) >> 2) + 1
            first, second, third = counted(slot, visible, low, step, WIDTH)
            low, high = narrowed(low, high, step, first, second, third, count)
        # No key is the largest uint32 (it would be a NaN), so the next one exists.
        above, _, _ = counted(slot, visible, low, tl.full((), 1, tl.uint32), WIDTH)
        room = count - above
        placed = tl.full((), 0, tl.int32)
        ties = tl.full((), 0, tl.int32)
        for first in range(0, tl.where(count > 0, visible, 0), WIDTH):
            position = first + tl.arange(0, WIDTH)
            inside = position < visible
            key = ordered(tl.load(slot + position, mask=inside, other=0.0), inside)
            tie = (key == low).to(tl.int32)
            taken = ((key > low) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= room))).to(tl.int32)
            place = placed + tl.cumsum(taken, 0) - taken
            tl.store(out + row * out_stride + place, position, mask=taken > 0)
            placed += tl.sum(taken, 0)
            ties += tl.sum(tie, 0)
        for first in range(0, TOPK, WIDTH):
            place = first + tl.arange(0, WIDTH)
            tl.store(out + row * out_stride + place, -1, mask=(place >= count) & (place < TOPK))
        tl.store(lens + row, count)
        if (count == 0) & (visible > 0):
            tl.atomic_add(nan_rows, 1, sem="relaxed")


@triton.jit
def extent(slot, visible, WIDTH: tl.constexpr):
    """The least and the largest ordered key of a row's scores, and how many there are: NaN are none."""
    least = tl.full((WIDTH,), 0xFFFFFFFF, tl.uint32)
    largest = tl.zeros((WIDTH,), tl.uint32)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in tl.range(0, visible, WIDTH, num_stages=3):
        position = first + tl.arange(0, WIDTH)
        inside = position < visible
        key = ordered(tl.load(slot + position, mask=inside, other=0.0), inside)
        total += (key > 0).to(tl.int32)
        largest = tl.maximum(largest, key)
        least = tl.minimum(least, tl.where(key > 0, key, 0xFFFFFFFF))
    high = tl.max(largest, 0)
    return tl.minimum(tl.min(least, 0), high), high, tl.sum(total, 0)


@triton.jit
def counted(slot, visible, low, step, WIDTH: tl.constexpr):
    """How many of a row's scores are not below low + step, low + 2 step and low + 3 step."""
    sums = tl.zeros((WIDTH,), tl.int64)
    for first in tl.range(0, visible, WIDTH, num_stages=3):
        position = first + tl.arange(0, WIDTH)
        inside = position < visible
        sums += not_below(ordered(tl.load(slot + position, mask=inside, other=0.0), inside), low, step)
    return tl.sum(count_of(sums, 0), 0), tl.sum(count_of(sums, 1), 0), tl.sum(count_of(sums, 2), 0)
