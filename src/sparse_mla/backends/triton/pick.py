"""From sampled scores to limits, from candidates to the best, exact; and the path for rows whose limit failed.

A row's limit is a pair (score, position): a candidate passes with a better score, or with an equal one before the
position. So rows in which thousands of keys tie, even all of them, are cut as finely as any other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .encoding import ordered
from .scores import COUNTER_WORDS, SLICED, load_keys, row_scores, sampled_position

LAST = tl.constexpr(2**31 - 1)
RUNTIME = [
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
def nth_largest(key, count):
    """The ``count``-th largest of uint32 keys, bit by bit; 0 if ``count`` is 0 or there are fewer above 0."""
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        tried = found | bit
        found = tl.where(tl.sum((key >= tried).to(tl.int32), 0) >= count, tried, found)
        bit = bit >> 1
    return tl.where(count > 0, found, 0)


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
    first_row,
    table_width,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """One program a row: its limit is the RANK-th best of its sample; none if the sample is smaller.

    Also starts the counters: how many candidates each row keeps, and how many rows failed.
    """
    local = tl.program_id(0)
    _, visible = row_visible(requests, visible_lens, first_row + local, table_width, BLOCK_SIZE)
    tl.store(kept + local * COUNTER_WORDS, 0)
    if local == 0:
        tl.store(failed, 0)
    limit = tl.full((), float("-inf"), tl.float32)
    limit_position = tl.full((), LAST, tl.int32)
    if visible > CAPACITY:
        number = tl.arange(0, SAMPLES)
        position = sampled_position(number, STRIDE)
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
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """One program a row: the TOPK best of its candidates, in no order; or the row goes on the list of failed ones."""
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
        tl.store(out + row * out_stride + place, position, mask=taken > 0)
        tl.store(lens + row, count)
        if (count == 0) & (visible > 0):
            tl.atomic_add(nan_rows, 1, sem="relaxed")


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def sort_rows(out, lens, first_row, out_stride, TOPK: tl.constexpr, TOPK_PADDED: tl.constexpr):
    """One program a row: its picked positions in ascending order, then −1."""
    row = (first_row + tl.program_id(0)).to(tl.int64)
    count = tl.load(lens + row)
    slot = tl.arange(0, TOPK_PADDED)
    target = out + row * out_stride + slot
    ascending = tl.sort(tl.load(target, mask=slot < count, other=LAST))
    tl.store(target, tl.where(slot < count, ascending, -1), mask=slot < TOPK)


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
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ENCODING: tl.constexpr,
    QUERY_ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Rows whose limit let too few or too many pass: all scores of a row in a slot of the pool, and the best of them.

    Always started; without such rows its programs find an empty list and leave. A program has one slot, and takes every
    num_programs-th row.
    """
    program = tl.program_id(0)
    for item in range(program, tl.load(failed), tl.num_programs(0)):
        local = tl.load(failed + 1 + item)
        row = (first_row + local).to(tl.int64)
        request, visible = row_visible(requests, visible_lens, row, table_width, BLOCK_SIZE)
        slot = pool + program.to(tl.int64) * slot_words
        tl.debug_barrier()  # the slot may still be read for the row before
        for first in range(0, visible, KEYS):
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
            score = row_scores(
                query,
                weights,
                keys,
                key_scale,
                row,
                query_stride,
                weight_stride,
                HEADS,
                HEADS_PADDED,
                DIM,
                QUERY_ENCODING,
                OPERAND,
            )
            tl.store(slot + position, score, mask=position < visible)
        tl.debug_barrier()  # stored scores are read by other threads
        count = tl.minimum(count_from(slot, visible, tl.full((), 1, tl.uint32), WIDTH), TOPK)
        least = tl.full((), 0, tl.uint32)
        bit = tl.full((), 0x80000000, tl.uint32)
        for _ in range(32):
            tried = least | bit
            least = tl.where(count_from(slot, visible, tried, WIDTH) >= count, tried, least)
            bit = bit >> 1
        # No key is the largest uint32 (it would be a NaN), so the next one exists.
        room = count - count_from(slot, visible, least + 1, WIDTH)
        placed = tl.full((), 0, tl.int32)
        ties = tl.full((), 0, tl.int32)
        for first in range(0, tl.where(count > 0, visible, 0), WIDTH):
            position = first + tl.arange(0, WIDTH)
            inside = position < visible
            key = ordered(tl.load(slot + position, mask=inside, other=0.0), inside)
            tie = (key == least).to(tl.int32)
            taken = ((key > least) | ((tie > 0) & (ties + tl.cumsum(tie, 0) <= room))).to(tl.int32)
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
def count_from(slot, visible, least, WIDTH: tl.constexpr):
    """How many of a row's scores have an ordered key of ``least`` or more."""
    total = tl.zeros((WIDTH,), tl.int32)
    for first in tl.range(0, visible, WIDTH, num_stages=3):
        position = first + tl.arange(0, WIDTH)
        inside = position < visible
        total += (ordered(tl.load(slot + position, mask=inside, other=0.0), inside) >= least).to(tl.int32)
    return tl.sum(total, 0)
