"""Which scores become candidates of their row, and where they go."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep(score, position, visible, limit, limit_position, kept, pool, start, CAPACITY: tl.constexpr):
    """Append the scores that reach a row's limit to its candidates, in no order: the pick goes by (score, position).

    A slot past CAPACITY is counted and not written: the count then says that the row needs the exact path. A candidate
    is one 64-bit word, so that it costs one address; 32-bit offsets reach all of the pool.
    """
    end = tl.where(score > limit, visible, tl.minimum(visible, limit_position))
    passes = (score >= limit) & (position < end)
    slot = tl.atomic_add(kept, 1, mask=passes, sem="relaxed")
    word = (score.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | position.to(tl.uint64)
    tl.store(pool + (start + slot), word, mask=passes & (slot < CAPACITY))


@triton.jit
def keep_in_place(score, position, visible, limit, limit_position, kept, pool, start, CAPACITY: tl.constexpr):
    """``keep`` for a tile of scores as the matrix units leave it, in PTX.

    Triton would first move scores and predicates to another layout, through shared memory and in four times the
    instructions. Right only where no two threads hold the same score. The slots of all elements are asked for before
    the first is used.
    """
    slot = tl.inline_asm_elementwise(
        """
        {
        .reg .pred reaches, above, passes;
        .reg .b32 end;
        setp.ge.f32 reaches, $1, $2;
        setp.gt.f32 above, $1, $2;
        selp.b32 end, $4, $5, above;
        setp.lt.and.s32 passes, $3, end, reaches;
        mov.b32 $0, 0x7fffffff;
        @passes atom.relaxed.gpu.global.add.u32 $0, [$6], 1;
        }
        """,
        "=r,f,f,r,r,r,l",
        [score, limit, position, visible, tl.minimum(visible, limit_position), kept.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred kept;
        .reg .b64 at;
        setp.lt.u32 kept, $1, $5;
        mad.wide.u32 at, $1, 8, $2;
        @kept st.global.v2.b32 [at], {$3, $4};
        mov.b32 $0, 0;
        }
        """,
        "=r,r,l,r,f,r",
        [slot, (pool + start).to(tl.uint64), position, score, tl.full((), CAPACITY, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
