"""The index scores, straight from the paged cache, each kept only where it can still be among the best.

The score of key s for query row t is ``scale[s] · Σ_h weight[t, h] · relu(q[t, h] · k[s])``. Two kernels compute it,
adding head after head: ``score_tiles`` for many rows of a request (a product for each head) and ``score_rows`` for one row
(all heads in one product). Neither stores what it computes: with STRIDE it scores a sample of the keys, which gives
each row a limit; without, it appends what reaches the row's limit to the row's candidates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import scratch
from .encoding import decoded
from .keep import keep, keep_in_place
from .launch import follow, nothing

RUNTIME = [
    "seed",
    "first_row",
    "stop_row",
    "query_stride",
    "weight_stride",
    "table_stride",
    "table_width",
    "block_stride",
    "scale_block_stride",
]
"""Whole numbers that differ from call to call: never specialised on, so that warm-up leaves nothing to compile."""
SLICED = ["weights", "scale", "block_table", "requests", "visible_lens", "out", "lens"]
"""Pointers that may begin anywhere, such as at a row of a longer buffer: never specialised on their alignment either. Rows
are reached through a stride of RUNTIME, so no load would gain from it."""
COUNTER_WORDS = tl.constexpr(scratch.COUNTER_WORDS)


@triton.jit
def sampled_position(sample, seed, STRIDE: tl.constexpr):
    """Position of a sample: in each STRIDE keys one, which of them only who knows the seed can say.

    So no page or turn lines up with the sample, and nobody can write a prompt whose limits fail. Mixed as MurmurHash3
    ends.
    """
    mixed = sample.to(tl.uint32) ^ seed.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
    mixed = mixed ^ (mixed >> 16)
    return sample * STRIDE + (mixed & (STRIDE - 1)).to(tl.int32)


@triton.jit
def add_head(total, product, weight):
    """One step of ``Σ_h weight[h] · relu(q[h] · k)``. Both kernels take it head after head: so their scores are equal."""
    return tl.fma(tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL), weight, total)


@triton.jit
def load_keys(
    values,
    scale,
    blocks,
    block_stride,
    scale_block_stride,
    position,
    inside,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Keys ``[N, DIM]`` ready to multiply and their scales ``[N]``; zeros outside."""
    block = tl.load(blocks + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    row = position % BLOCK_SIZE
    start = (block * block_stride + row * ROW_STRIDE) * UNIT
    dim = tl.arange(0, DIM)
    stored = tl.load(values + start[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    keys = decoded(stored, ENCODING).to(OPERAND)
    if SCALED:
        return keys, tl.load(scale + block * scale_block_stride + row, mask=inside, other=0.0)
    return keys, tl.where(inside, 1.0, 0.0)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def score_tiles(
    query,
    weights,
    values,
    scale,
    block_table,
    requests,
    visible_lens,
    limits,
    limit_positions,
    kept,
    pool,
    candidates,
    seed,
    first_row,
    query_stride,
    weight_stride,
    table_stride,
    table_width,
    block_stride,
    scale_block_stride,
    stop_row,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ENCODING: tl.constexpr,
    QUERY_ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
    SEVERAL: tl.constexpr,
    PTX: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows [first_row, stop_row): a tile of KEYS keys (axis 0) by a tile of ROWS rows (axis 1), head after head.

    Axis 2 counts the requests whose rows meet in one row tile; the rule is one. There is no loop over them, because
    what the compiler would keep in registers across it costs a third of the programs that fit.
    With STRIDE 0 all keys are scored and the candidates kept; else one key in STRIDE, and its score stored.
    """
    follow(EARLY)
    index = tl.arange(0, ROWS)
    base = tl.program_id(1) * ROWS
    row = first_row + base + index
    mine = row < stop_row
    request_of = tl.load(requests + row, mask=mine, other=-1)
    request = tl.load(requests + first_row + base)
    if SEVERAL:
        before = tl.load(requests + row - 1, mask=mine & (index > 0), other=-1)
        mine = mine & (tl.cumsum(((request_of != before) & (index > 0)).to(tl.int32), 0) == tl.program_id(2))
        request = tl.max(tl.where(mine, request_of, -1), 0)
    visible = tl.load(visible_lens + row, mask=mine & (request_of >= 0), other=0)
    visible = tl.minimum(visible, table_width * BLOCK_SIZE)
    number = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    nearest = tl.program_id(0) * KEYS
    position = number
    if STRIDE:
        visible = tl.where(visible <= CAPACITY, 0, visible)
        position = sampled_position(number, seed, STRIDE)
        nearest = nearest * STRIDE
    reach = tl.max(visible, 0)
    if reach <= nearest:
        return
    keys, key_scale = load_keys(
        values,
        scale,
        block_table + request.to(tl.int64) * table_stride,
        block_stride,
        scale_block_stride,
        position,
        position < reach,
        ROW_STRIDE,
        BLOCK_SIZE,
        DIM,
        UNIT,
        SCALED,
        ENCODING,
        OPERAND,
    )
    turned = tl.trans(keys)
    total = tl.zeros((ROWS, KEYS), tl.float32)
    near = tl.minimum(index, stop_row - first_row - base - 1)  # rows past the end read the last one, and keep nothing
    asked_at = query + (first_row + base).to(tl.int64) * query_stride * DIM
    asked_at = asked_at + (near * query_stride * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    weight_at = weights + (first_row + base).to(tl.int64) * weight_stride + near * weight_stride
    for head in tl.range(0, HEADS, num_stages=STAGES):
        asked = tl.load(asked_at + head * DIM)
        asked = decoded(asked, QUERY_ENCODING).to(OPERAND)
        product = tl.dot(asked, turned, input_precision="ieee")
        weight = tl.load(weight_at + head)
        total = add_head(total, product, weight[:, None])
    score = total * key_scale[None, :]
    local = base + index
    if STRIDE:
        target = pool + (local * SAMPLES)[:, None] + number[None, :]
        tl.store(target, score, mask=(position[None, :] < visible[:, None]) & (number < SAMPLES)[None, :])
    else:
        position = position[None, :]
        visible = visible[:, None]
        limit = tl.load(limits + local, mask=mine, other=0.0)[:, None]
        limit_position = tl.load(limit_positions + local, mask=mine, other=0)[:, None]
        tickets = (kept + local * COUNTER_WORDS)[:, None]
        start = (local * CAPACITY)[:, None]
        if PTX:
            keep_in_place(score, position, visible, limit, limit_position, tickets, candidates, start, CAPACITY)
        else:
            tickets = tickets + tl.zeros((ROWS, KEYS), tl.int32)
            keep(score, position, visible, limit, limit_position, tickets, candidates, start, CAPACITY)


@triton.jit
def load_row(
    query,
    weights,
    row,
    query_stride,
    weight_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    QUERY_ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """What one row asks: its queries ``[DIM, HEADS_PADDED]``, ready to multiply, and a tuple of its HEADS weights."""
    head, dim = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM)
    line = row * query_stride * DIM + head * DIM
    asked = tl.load(query + line[None, :] + dim[:, None], mask=(head < HEADS)[None, :], other=0.0)
    weight = nothing()
    for i in tl.static_range(HEADS):
        weight = weight + (tl.load(weights + row * weight_stride + i),)
    return decoded(asked, QUERY_ENCODING).to(OPERAND), weight


@triton.jit
def row_scores(keys, key_scale, asked, weight, HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, LEVELS: tl.constexpr):
    """Scores ``[N]`` of one row against keys ``[N, DIM]``: all index heads in one product, then added head after head.

    The order of that sum is the one of ``score_tiles``, for which the product is taken apart into columns.
    """
    product = tl.dot(keys, asked, input_precision="ieee")
    N: tl.constexpr = product.shape[0]
    columns = (product,)
    for level in tl.static_range(LEVELS):  # lowest bit of the head first, so that columns[i] ends as head i
        even, odd = nothing(), nothing()
        for i in tl.static_range(len(columns)):
            one, other = tl.split(tl.reshape(columns[i], (N, HEADS_PADDED >> (level + 1), 2)))
            even, odd = even + (one,), odd + (other,)
        columns = even + odd
    total = tl.zeros((N,), tl.float32)
    for i in tl.static_range(HEADS):
        total = add_head(total, tl.reshape(columns[i], (N,)), weight[i])
    return total * key_scale


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=SLICED)
def score_rows(
    query,
    weights,
    values,
    scale,
    block_table,
    requests,
    visible_lens,
    limits,
    limit_positions,
    kept,
    pool,
    candidates,
    seed,
    first_row,
    query_stride,
    weight_stride,
    table_stride,
    table_width,
    block_stride,
    scale_block_stride,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    SAMPLES: tl.constexpr,
    UNIT: tl.constexpr,
    SCALED: tl.constexpr,
    ENCODING: tl.constexpr,
    QUERY_ENCODING: tl.constexpr,
    OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As ``score_tiles``, for one row (axis 1): axis 0 walks over its key tiles in steps.

    The number of programs on axis 0 is the caller's and independent of lengths: a graph that was captured for a long
    context costs little in a short one.
    """
    follow(EARLY)
    local = tl.program_id(1)
    row = (first_row + local).to(tl.int64)
    request = tl.load(requests + row)
    visible = tl.minimum(tl.load(visible_lens + row), table_width * BLOCK_SIZE)
    visible = tl.where(request < 0, 0, visible)
    count = visible
    if STRIDE:
        visible = tl.where(visible <= CAPACITY, 0, visible)
        count = (visible + STRIDE - 1) // STRIDE
    asked, weight = load_row(
        query, weights, row, query_stride, weight_stride, HEADS, HEADS_PADDED, DIM, QUERY_ENCODING, OPERAND
    )
    limit, limit_position = tl.load(limits + local), tl.load(limit_positions + local)
    tickets = kept + local * COUNTER_WORDS + tl.zeros((KEYS,), tl.int32)
    for tile in tl.range(tl.program_id(0), (count + KEYS - 1) // KEYS, tl.num_programs(0), num_stages=STAGES):
        number = tile * KEYS + tl.arange(0, KEYS)
        position = sampled_position(number, seed, STRIDE) if STRIDE else number
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
        if STRIDE:
            tl.store(pool + local * SAMPLES + number, score, mask=(position < visible) & (number < SAMPLES))
        else:
            keep(score, position, visible, limit, limit_position, tickets, candidates, local * CAPACITY, CAPACITY)
