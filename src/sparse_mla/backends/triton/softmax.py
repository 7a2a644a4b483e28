"""An online softmax of a tile of heads over rows that are both key and value: maximum, mass and unnormalised output.

Rows, queries and output come in pieces of some columns each, as tuples: what Triton addresses best. Scores are in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import nothing

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite(peak):
    """What to subtract from scores: −inf − (−inf) would be NaN, so where nothing was seen it is 0 and exp2(−inf) = 0."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def load_pieces(at, inside, other, RANK: tl.constexpr, ROPE: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr):
    """Rows ``[N, RANK + ROPE]`` ready to multiply, as a tuple of pieces: the latent part in steps of WIDTH, the rope part."""
    pieces = nothing()
    for first in tl.static_range(0, RANK, WIDTH):
        piece = tl.load(at + (first + tl.arange(0, WIDTH))[None, :], mask=inside, other=other)
        pieces = pieces + (piece.to(OPERAND),)
    if ROPE:
        piece = tl.load(at + (RANK + tl.arange(0, ROPE))[None, :], mask=inside, other=other)
        pieces = pieces + (piece.to(OPERAND),)
    return pieces


@triton.jit
def unseen(HEAD_TILE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """A softmax over nothing: maximum (base 2) and mass of each head, and its unnormalised output in pieces of WIDTH."""
    total = nothing()
    for _ in tl.static_range(0, RANK, WIDTH):
        total = total + (tl.zeros((HEAD_TILE, WIDTH), tl.float32),)
    return tl.full((HEAD_TILE,), float("-inf"), tl.float32), tl.zeros((HEAD_TILE,), tl.float32), total


@triton.jit
def merged(peak, mass, total, part_peak, part_mass, part_total):
    """Add one part to a running softmax; the order of operations is the contract, hence the explicit fma."""
    top = tl.maximum(peak, part_peak)
    old, new = tl.exp2(peak - finite(top)), tl.exp2(part_peak - finite(top))
    mass = tl.fma(part_mass, new, mass * old)
    sums = nothing()
    for i in tl.static_range(len(total)):
        sums = sums + (tl.fma(part_total[i], new[:, None] + tl.zeros_like(total[i]), total[i] * old[:, None]),)
    return top, mass, sums


@triton.jit
def store_result(out, lse, row, head, peak, mass, total, HEADS: tl.constexpr, LSE: tl.constexpr):
    """``out [H, RANK]`` and the natural log of the sum; 0 and −inf where nothing was seen."""
    real = head < HEADS
    line = row * HEADS + head
    values = nothing()
    for i in tl.static_range(len(total)):
        values = values + (total[i] / tl.where(mass == 0.0, 1.0, mass)[:, None],)
    store_pieces(out, line, real, values)
    if LSE:
        tl.store(lse + line, tl.where(mass == 0.0, float("-inf"), (peak + tl.log2(mass)) * LN_2), mask=real)


@triton.jit
def store_pieces(target, line, real, pieces):
    """Rows in pieces ``[H, WIDTH]`` to the lines ``line [H]`` of ``target``."""
    WIDTH: tl.constexpr = pieces[0].shape[1]
    for i in tl.static_range(len(pieces)):
        at = target + (line * (len(pieces) * WIDTH))[:, None] + (tl.arange(0, WIDTH) + i * WIDTH)[None, :]
        tl.store(at, pieces[i].to(target.dtype.element_ty), mask=real[:, None])


@triton.jit
def take_rows(asked, rows, inside, peak, mass, total, scale):
    """Add cache rows, pieces ``[N, W]``, to the softmax of the queries, pieces ``[H, W]``, where ``inside [N]``.

    All pieces of a row are its key; those that ``total`` has, its value.
    """
    score = tl.dot(asked[0], tl.trans(rows[0]), input_precision="ieee")
    for i in tl.static_range(1, len(rows)):
        score = tl.dot(asked[i], tl.trans(rows[i]), score, input_precision="ieee")
    score = tl.where(inside[None, :], score * scale, float("-inf"))
    top = tl.maximum(peak, tl.max(score, 1))
    old = tl.exp2(peak - finite(top))
    weight = tl.exp2(score - finite(top)[:, None])
    mass = mass * old + tl.sum(weight, 1)
    weight = weight.to(rows[0].dtype)
    sums = nothing()
    for i in tl.static_range(len(total)):
        sums = sums + (tl.dot(weight, rows[i], total[i] * old[:, None], input_precision="ieee"),)
    return top, mass, sums
