"""Named shapes with tags, shared by the conformance suite, bench and the tests.

Small ones keep to what every backend is built for (``kv_lora_rank`` 512, rope 64, index dim 64 or 128), so that each
backend meets the same cases; odd ones are for whoever declares no limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..cache import CacheFormat, fp8_ds_mla, index_fp8, plain
from ..dims import MLADims
from ..problem import Problem

CI, FULL, BENCH = "ci", "full", "bench"
TAGS = (CI, FULL, BENCH)
"""ci: on every commit; full: before a release and for a kernel from outside; bench: real models' sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """A model's sizes on one rank, with the formats of its two caches."""

    name: str
    dims: MLADims
    latent: CacheFormat
    index: CacheFormat
    dtype: str = "bf16"
    block_size: int = 16
    tag: str = CI

    def problem(
        self, *, max_num_tokens: int, max_num_requests: int, max_model_len: int, deterministic: bool = True
    ) -> Problem:
        """Strict mode unless asked otherwise: it is what promises prefill and decode equal in bits."""
        return Problem(
            dims=self.dims,
            dtype=self.dtype,
            latent=self.latent,
            index=self.index,
            latent_block_size=self.block_size,
            index_block_size=self.block_size,
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_model_len=max_model_len,
            deterministic=deterministic,
        )

    def blocks_of(self, block_size: int) -> Geometry:
        """The same sizes in caches with other blocks."""
        return replace(self, name=f"{self.name}-block{block_size}", block_size=block_size)

    def __str__(self) -> str:
        return self.name


def sizes(  # noqa: D103 (the fields are MLADims')
    heads: int, index_heads: int, index_topk: int, *, index_dim: int = 64, rank: int = 512, rope: int = 64
) -> MLADims:
    return MLADims(
        num_heads=heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=index_heads,
        index_head_dim=index_dim,
        index_topk=index_topk,
        owns_indexer=(True,),
    )


def plain_caches(name: str, dims: MLADims, dtype: str = "bf16", **rest: object) -> Geometry:
    """Both caches in the activations' dtype."""
    latent, index = plain(dims.head_dim, dtype), plain(dims.index_head_dim, dtype)
    return replace(Geometry(name=name, dims=dims, latent=latent, index=index, dtype=dtype), **rest)  # type: ignore[arg-type]


def fp8_caches(name: str, dims: MLADims, encoding: str = "fp8", **rest: object) -> Geometry:
    """``fp8_ds_mla`` latent and ``index_fp8`` keys in one encoding."""
    latent = fp8_ds_mla(dims.kv_lora_rank, dims.qk_rope_head_dim, encoding=encoding)
    index = index_fp8(dims.index_head_dim, encoding=encoding)
    return replace(Geometry(name=name, dims=dims, latent=latent, index=index), **rest)  # type: ignore[arg-type]


_SMALL = sizes(4, 4, 24)
PLAIN = plain_caches("plain", _SMALL)
FP8 = fp8_caches("fp8", _SMALL)
FNUZ = fp8_caches("fnuz", _SMALL, "fp8fnuz")
ODD = plain_caches("odd", sizes(3, 3, 7, index_dim=32, rank=80, rope=0), "f32", block_size=5)
SMALL = (PLAIN, FP8, FNUZ, ODD)

_GLM = replace(sizes(16, 32, 2048, index_dim=128), qk_nope_head_dim=192, v_head_dim=256)
GLM_TP4 = replace(plain_caches("glm-5.1-tp4", _GLM, tag=BENCH, block_size=64), index=index_fp8(128))
GLM_TP4_FP8 = fp8_caches("glm-5.1-tp4-fp8", _GLM, tag=BENCH, block_size=64)
DEEPSEEK_TP8 = fp8_caches("deepseek-v3.2-tp8", sizes(16, 64, 2048, index_dim=128), tag=BENCH, block_size=64)
MODELS = (GLM_TP4, GLM_TP4_FP8, DEEPSEEK_TP8)
