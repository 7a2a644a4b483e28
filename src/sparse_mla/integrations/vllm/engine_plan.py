"""What one engine asks of sparse-mla: its facts as a Problem, refused with every reason, and the plan for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import envs
from ...cache import index_fp8, plain
from ...device import probe
from ...dims import MLADims
from ...errors import BackendRejectedError
from ...plan import Plan, make_plan
from ...problem import Problem
from ...requirements import Reason
from ...shapes import dtype_name
from . import seams

if TYPE_CHECKING:
    from ...cache import CacheFormat
    from .seams import Engine


def plan_for(engine: Engine) -> Plan:
    """The plan of one worker.

    Raises:
        BackendRejectedError: the engine asks for something unsupported, or no backend can run a stage.
        ConfigError: the model's config contradicts itself.
    """
    dims = MLADims.from_config(engine.fields, tensor_parallel=engine.tensor_parallel)
    latent = seams.latent_format(engine, dims)
    reasons = _refusals(engine, latent)
    if reasons or latent is None:
        raise BackendRejectedError("sparse-mla cannot serve this engine", reasons, "Change these flags.")
    problem = Problem(
        dims=dims,
        dtype=dtype_name(engine.dtype),
        latent=latent,
        index=_index_format(engine, dims),
        latent_block_size=engine.block_size,
        index_block_size=engine.block_size,
        max_num_tokens=engine.max_num_tokens,
        max_num_requests=engine.max_num_requests,
        max_model_len=engine.max_model_len,
        deterministic=engine.batch_invariant or envs.get("SPARSE_MLA_DETERMINISTIC"),
    )
    return make_plan(problem, probe(engine.device))


def _index_format(engine: Engine, dims: MLADims) -> CacheFormat:
    if envs.get("SPARSE_MLA_INDEX_KEYS") == "plain":
        return plain(dims.index_head_dim, dtype_name(engine.dtype))
    return index_fp8(dims.index_head_dim, encoding=engine.fp8)


def _refusals(engine: Engine, latent: CacheFormat | None) -> list[Reason]:
    reasons = [
        Reason(what=flag, needs="1", got=str(got), hint="Sharding a sequence over ranks is not supported yet.")
        for flag, got in (
            ("--decode-context-parallel-size", engine.decode_context_parallel),
            ("--prefill-context-parallel-size", engine.prefill_context_parallel),
        )
        if got > 1
    ]
    if engine.kv_connector is not None:
        reasons.append(
            Reason(what="KV connector", needs="none", got=engine.kv_connector, hint="Drop --kv-transfer-config.")
        )
    if latent is None:
        needs = ", ".join(seams.LATENT_FORMATS)
        reasons.append(Reason(what="--kv-cache-dtype", needs=needs, got=engine.kv_cache_dtype))
    if engine.mixed_kv_cache:
        reasons.append(Reason(what="--kv-cache-dtype-skip-layers", needs="none", got="some layers"))
    if dtype_name(engine.dtype) not in {"bf16", "f16", "f32"}:
        reasons.append(Reason(what="--dtype", needs="bfloat16, float16 or float32", got=str(engine.dtype)))
    return reasons
