"""What this package would run on a device: its own table, asked offline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cache import fp8_ds_mla, index_fp8, plain
from ..device import KNOWN
from ..dims import MLADims, read_config
from ..errors import SparseMLAError
from ..problem import Problem, Stage
from ..resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..cache import CacheFormat
    from ..device import Device

# GLM-5.1's sizes, for questions without a model.
_TYPICAL = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChoice:
    """One stage: the backend that would run it, its mode, whether an end-to-end run is on record; or why none can."""

    stage: str
    backend: str
    mode: str
    proved: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Our side of the answer for ``arch``; ``trouble`` when the question itself cannot be answered."""

    arch: str
    stages: tuple[StageChoice, ...]
    trouble: str

    @property
    def serves(self) -> bool:
        """Whether some backend can run every stage."""
        return bool(self.stages) and all(choice.backend for choice in self.stages)

    @property
    def proved(self) -> bool:
        """Whether every chosen backend has an end-to-end run on record for this kind of device."""
        return self.serves and all(choice.proved for choice in self.stages)


def raw_config(path: str | None) -> Mapping[str, Any]:
    """The model config's fields, or the typical model's."""
    return read_config(path) if path else _TYPICAL


def resolve_all(facts: Mapping[str, Any], model: str | None, simulate: str | None) -> Ours:
    """Which of our backends would run each stage on the device of ``facts``."""
    arch = str(simulate or facts.get("arch") or "cpu")
    device = KNOWN.get(arch)
    if device is None:
        return Ours(arch=arch, stages=(), trouble=f"{arch} is outside the compile matrix: {' '.join(KNOWN)}")
    try:
        problem = _problem(facts, model, device)
        stages = tuple(_choice(stage, problem, device) for stage in Stage)
    except SparseMLAError as error:
        return Ours(arch=arch, stages=(), trouble=" ".join(str(error).split()))
    return Ours(arch=arch, stages=stages, trouble="")


def proved(arch: str) -> bool:
    """Whether an end-to-end run is on record for this kind of device."""
    return resolve_all({}, None, arch).proved


def _choice(stage: Stage, problem: Problem, device: Device) -> StageChoice:
    resolution = resolve(stage, problem, device)
    row = resolution.chosen
    reasons = tuple(f"{verdict.row.name}: {reason}" for verdict in resolution.verdicts for reason in verdict.reasons)
    return StageChoice(
        stage=str(stage),
        backend=row.name if row else "",
        mode=row.mode(problem, device) if row else "",
        proved=row is not None and device.kind in row.proved_on,
        reasons=reasons,
    )


def _problem(facts: Mapping[str, Any], model: str | None, device: Device) -> Problem:
    dims = MLADims.from_config(dict(raw_config(model)), tensor_parallel=facts.get("tp") or 1)
    dtype = _DTYPES.get(str(facts.get("dtype") or "bfloat16"), "bf16")
    encoding = device.fp8 or "fp8"
    block_size = facts.get("block_size") or 64
    return Problem(
        dims=dims,
        dtype=dtype,
        latent=_latent(str(facts.get("kv_cache_dtype") or "auto"), dims, dtype, encoding),
        index=index_fp8(dims.index_head_dim, encoding=encoding),
        latent_block_size=block_size,
        index_block_size=block_size,
        max_num_tokens=facts.get("max_num_batched_tokens") or 8192,
        max_num_requests=256,
        max_model_len=facts.get("max_model_len") or 131072,
    )


def _latent(kv_cache_dtype: str, dims: MLADims, dtype: str, encoding: str) -> CacheFormat:
    if kv_cache_dtype == "fp8_ds_mla":
        return fp8_ds_mla(dims.kv_lora_rank, dims.qk_rope_head_dim, encoding=encoding)
    return plain(dims.head_dim, {"bfloat16": "bf16", "float16": "f16"}.get(kv_cache_dtype, dtype))
