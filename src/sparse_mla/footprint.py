"""Bytes before starting: caches, scratch and weights of one rank, from the model's config alone. Needs no torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from .device import Device
    from .dims import MLADims
    from .plan import Plan

_MAX_HEADER_BYTES = 100 << 20
_LOGITS_BYTES = 512 << 20  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, the same default since 0.19

# Tensors that vLLM splits over the ranks of a tensor-parallel group; all others are whole on every rank.
_SHARDED = ("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Some bytes and where the figure comes from."""

    name: str
    nbytes: int
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The flags of an engine that decide memory."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_num_tokens: int
    max_num_requests: int
    max_model_len: int
    vllm_version: str = "0.32.0"


def stages(num_layers: int, pipeline_parallel: int) -> list[range]:
    """Layers of each pipeline stage, as vLLM splits them: the remainder goes to stages before the last one."""
    counts = [num_layers // pipeline_parallel] * pipeline_parallel
    for stage in range(2, num_layers % pipeline_parallel + 2):
        counts[-stage] += 1
    starts = [sum(counts[:index]) for index in range(pipeline_parallel)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stages_without_indices(dims: MLADims, pipeline_parallel: int) -> list[int]:
    """Pipeline stages whose first layer reuses indices that only an earlier stage has."""
    split = stages(dims.num_layers, pipeline_parallel)
    return [stage for stage, layers in enumerate(split) if layers and not dims.owns_indexer[layers[0]]]


def cache_bytes_per_token(plan: Plan, layers: range) -> int:
    """Both caches of a pipeline stage's layers; a layer that shares indices has no index cache."""
    owners = sum(plan.problem.dims.owns_indexer[layer] for layer in layers)
    return len(layers) * plan.problem.latent.row_bytes + owners * plan.problem.index.row_bytes


def native_reservations(engine: Engine, dims: MLADims, device: Device, latent: str) -> list[Item]:
    """What vLLM's own sparse path reserves while profiling, by version; read from its source, not run."""
    version = Version(engine.vllm_version)
    if version not in SpecifierSet(">=0.19,<0.34"):
        return []
    source = f"vLLM {version} source, read, not run"
    factor = 2 if version >= Version("0.32") and engine.max_model_len > 256 << 10 else 5
    latent_row_bytes = dims.head_dim * 2
    rows = engine.max_model_len * (latent_row_bytes // (dims.index_head_dim + 4)) * factor
    items = [Item(name="gather of index keys", nbytes=rows * (dims.index_head_dim + 4), source=source)]
    if device.kind != "rocm" or version >= Version("0.23"):
        items.append(Item(name="scores of one prefill pass (cap)", nbytes=_LOGITS_BYTES, source=source))
    if device.kind == "cuda" and latent == "fp8_ds_mla":
        nbytes = engine.max_model_len * factor * latent_row_bytes
        items.append(Item(name="up-converted latents of a prefill", nbytes=nbytes, source=source))
    if device.kind == "rocm" and version >= Version("0.23"):
        bounded = version >= Version("0.32")
        decode_rows = min(engine.max_num_tokens, engine.max_num_requests) if bounded else engine.max_num_tokens
        planes = 1 if device.arch in {"gfx942", "gfx950"} else dims.index_n_heads
        nbytes = decode_rows * engine.max_model_len * 4 * planes
        items.append(Item(name="scores of a decode step", nbytes=nbytes, source=source))
    return items


def weight_bytes(fields: Mapping[str, Any], folder: Path | None, tensor_parallel: int, layers: range) -> Item:
    """Weights of one rank of one pipeline stage.

    Read from the headers of ``*.safetensors`` in ``folder`` where all of them are there, else counted from the config, and
    where there is an index scaled to the total that it states. Layers behind the config's (drafts) are not counted.

    Raises:
        ConfigError: a file that is not safetensors, or an index that is none.
    """
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    index = _index(folder) if folder is not None else None
    if files and (index is None or index.files <= {file.name for file in files}):
        tensors = [tensor for file in files for tensor in _header(file)]
        source = f"headers of {len(files)} safetensors files"
    else:
        tensors = list(_tensors_of(fields))
        source = "counted from the config"
        if index is not None and index.total_bytes:
            counted = sum(nbytes for _, nbytes in tensors)
            tensors = [(name, nbytes * index.total_bytes // counted) for name, nbytes in tensors]
            source = f"total of the safetensors index, shared out as the config counts ({len(files)} of {len(index.files)} files here)"
    stated = fields.get("num_hidden_layers")
    last = stated - 1 if isinstance(stated, int) else max(_layer(name) for name, _ in tensors)
    total = 0
    for name, nbytes in tensors:
        layer = _layer(name)
        outer = layer < 0 and (layers.start == 0 if "embed_tokens" in name else layers.stop > last)
        if layer in layers or outer:
            total += ceil(nbytes / tensor_parallel) if any(part in name for part in _SHARDED) else nbytes
    return Item(name="weights", nbytes=total, source=source)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Index:
    """What ``model.safetensors.index.json`` states; ``total_bytes`` 0 when it does not."""

    files: frozenset[str]
    total_bytes: int


def _index(folder: Path) -> _Index | None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return None
    try:
        with path.open("rb") as stream:
            content = json.loads(stream.read(_MAX_HEADER_BYTES))
        total = content.get("metadata", {}).get("total_size", 0)
        files = frozenset(str(name) for name in content["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a safetensors index", got=str(error)[:80]) from None
    return _Index(files=files, total_bytes=total if isinstance(total, int) and 0 < total < 1 << 60 else 0)


def _layer(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1]) if "layers" in parts else -1


def _header(file: Path) -> list[tuple[str, int]]:
    """Names and bytes of a safetensors file's tensors. Layout: u64 length, then that many bytes of JSON."""
    try:
        with file.open("rb") as stream:
            size = struct.unpack("<Q", stream.read(8))[0]
            header = json.loads(stream.read(size) if size <= _MAX_HEADER_BYTES else b"")
        offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        sizes = [(name, int(stop) - int(start)) for name, (start, stop) in offsets.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is not a safetensors file", got=str(error)[:80]) from None
    return sizes


def _tensors_of(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Names and bytes of a checkpoint's tensors, from the shapes of ``glm_moe_dsa`` and ``deepseek_v32`` models."""
    from .dims import indexer_schedule

    f = _Shapes(fields)
    quantised = 1 if (fields.get("quantization_config") or {}).get("quant_method") == "fp8" else 2
    yield "model.embed_tokens", f.vocab_size * f.hidden_size * 2
    yield "lm_head", f.vocab_size * f.hidden_size * 2
    owners = indexer_schedule(fields)
    heads, latent = f.num_attention_heads, f.kv_lora_rank
    for layer in range(f.num_hidden_layers):
        at = f"model.layers.{layer}"
        matrices = {
            "self_attn.q_a_proj": f.hidden_size * f.q_lora_rank,
            "self_attn.q_b_proj": f.q_lora_rank * heads * (f.qk_nope_head_dim + f.qk_rope_head_dim),
            "self_attn.kv_a_proj_with_mqa": f.hidden_size * (latent + f.qk_rope_head_dim),
            "self_attn.kv_b_proj": latent * heads * (f.qk_nope_head_dim + f.v_head_dim),
            "self_attn.o_proj": heads * f.v_head_dim * f.hidden_size,
        }
        if owners[layer]:
            matrices["self_attn.indexer.wq_b"] = f.q_lora_rank * f.index_n_heads * f.index_head_dim
            matrices["self_attn.indexer.wk"] = f.hidden_size * f.index_head_dim
            yield f"{at}.self_attn.indexer.weights_proj", f.hidden_size * f.index_n_heads * 2
        dense = layer < f.first_k_dense_replace
        width = f.intermediate_size if dense else f.moe_intermediate_size
        experts = 1 if dense else f.n_routed_experts + f.n_shared_experts
        for name in ("gate_proj", "up_proj", "down_proj"):
            matrices[f"mlp.{name}"] = experts * f.hidden_size * width
        if not dense:
            yield f"{at}.mlp.gate", f.hidden_size * f.n_routed_experts * 2
        for name, count in matrices.items():
            yield f"{at}.{name}", count * quantised


class _Shapes:
    """Whole numbers of a config by attribute, checked when they are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> int:
        value = self._fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 24:
            raise ConfigError(f"config key {name}", needs="a whole number up to 2^24", got=repr(value))
        return value


def fit(memory_bytes: int, fixed: int, bytes_per_token: int) -> int:
    """Tokens of cache that fit beside ``fixed`` bytes; negative when not even those do."""
    return (memory_bytes - fixed) // bytes_per_token
