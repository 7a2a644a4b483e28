"""THE ordered table: which backends exist, what each needs, in the order in which ``auto`` tries them."""

from __future__ import annotations

from ..problem import Stage
from ..requirements import Requires
from .base import Row
from .eager.scratch import attend_buffers, no_buffers, select_buffers, strict
from .triton import scratch as triton_scratch

_EAGER = "sparse_mla.backends.eager"
_TRITON = "sparse_mla.backends.triton"
TRITON_ARCHS = (
    *("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"),
    *("gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"),
)
"""Architectures of the compile matrix: what is not compiled in CI is not claimed."""
_FLOATS = ("bf16", "f16", "f32")
_PLAIN = ("plain:bf16", "plain:f16", "plain:f32")
_INDEX = ("index_fp8:fp8", "index_fp8:fp8fnuz", *_PLAIN)

TABLE: tuple[Row, ...] = (
    Row(
        stage=Stage.WRITE,
        name="triton",
        path=f"{_TRITON}.write:Write",
        requires=Requires(
            archs=TRITON_ARCHS,
            dtypes=_FLOATS,
            latent=_PLAIN,
            index=_INDEX,
            index_head_dims=(32, 64, 128),
            packages=("triton",),
        ),
        scratch=triton_scratch.no_buffers,
        mode=triton_scratch.always_strict,
    ),
    Row(
        stage=Stage.SELECT,
        name="triton",
        path=f"{_TRITON}.select:Select",
        requires=Requires(
            archs=TRITON_ARCHS,
            index=_INDEX,
            index_head_dims=(32, 64, 128),
            max_index_heads=64,
            max_index_topk=4096,
            packages=("triton",),
        ),
        scratch=triton_scratch.select_buffers,
        mode=triton_scratch.always_strict,
    ),
    Row(
        stage=Stage.ATTEND,
        name="triton",
        path=f"{_TRITON}.attend:Attend",
        requires=Requires(
            archs=TRITON_ARCHS,
            dtypes=_FLOATS,
            latent=_PLAIN,
            kv_lora_ranks=(512,),
            rope_dims=(0, 64),
            max_heads=128,
            max_index_topk=4096,
            packages=("triton",),
        ),
        scratch=triton_scratch.attend_buffers,
        mode=triton_scratch.attend_mode,
    ),
    Row(
        stage=Stage.WRITE,
        name="eager",
        path=f"{_EAGER}.write:Write",
        requires=Requires(),
        scratch=no_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
    Row(
        stage=Stage.SELECT,
        name="eager",
        path=f"{_EAGER}.select:Select",
        requires=Requires(),
        scratch=select_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
    Row(
        stage=Stage.ATTEND,
        name="eager",
        path=f"{_EAGER}.attend:Attend",
        requires=Requires(),
        scratch=attend_buffers,
        mode=strict,
        proved_on=("cpu",),
    ),
)
