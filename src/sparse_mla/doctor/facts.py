"""Facts: what rules and formulas of the knowledge base read. Each has one source; flags beat the log, the log the machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import envs
from ..dims import MODEL_TYPES, indexer_schedule, read_config
from ..errors import ConfigError, UsageError
from .signatures import Signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .environment import Machine
    from .expressions import Fact
    from .logs import LogReport

DEFAULT_LOGITS_MB = 512  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB when nobody sets it
_LOGITS_VARIABLE = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
_DEFAULT_TOPK = 2048
_PLUGIN = "sparse_mla"
_INT = re.compile(r"\d{1,15}")


def _settings(name: str) -> tuple[Signature, ...]:
    """The two ways in which engines print a setting: ``name=value`` and ``'name': value``."""
    return (Signature(f"{name}={{value:word}}"), Signature(f"'{name}': {{value:word}}"))


LOG_FACTS: Mapping[str, tuple[Signature, ...]] = {
    "version:vllm": (
        Signature("Initializing a V1 LLM engine (v{value:version}"),
        Signature("vLLM API server version {value:version}"),
        Signature("vLLM engine version {value:version}"),
    ),
    "version:sglang": (Signature("sglang version: {value:version}"), Signature("sglang_version={value:version}")),
    "tp": _settings("tensor_parallel_size"),
    "pp": _settings("pipeline_parallel_size"),
    "dcp": _settings("decode_context_parallel_size"),
    "max_model_len": (*_settings("max_model_len"), Signature("max_seq_len={value:word}")),
    "max_num_batched_tokens": _settings("max_num_batched_tokens"),
    "kv_cache_dtype": (Signature("kv_cache_dtype={value:word}"), Signature("'kv_cache_dtype': '{value:word}")),
    "block_size": (Signature("'block_size': {value:word}"), Signature("cache_config.block_size={value:word}")),
    "speculative_tokens": (
        Signature("num_speculative_tokens={value:word}"),
        Signature("num_speculative_tokens': {value:word}"),
        Signature('num_speculative_tokens": {value:word}'),
    ),
    "candidates": (Signature("attention backend out of potential backends: [{value}]"),),
    "max:prompt_tokens": (Signature('"prompt_tokens": {value:num}'),),
    "arch": (Signature("GCN arch: {value:word}"), Signature("gcnArchName='{value:word}")),
    "logits_mb": (Signature(f"{_LOGITS_VARIABLE}={{value:num}}"),),
    "batch_invariant": (Signature("VLLM_BATCH_INVARIANT={value:num}"),),
    "hisparse": (Signature("hisparse_config=HiSparseConfig({value}"),),
    "calculate_kv_scales": (Signature("'calculate_kv_scales': {value:word}"),),
}
_NUMBERS = {
    "tp",
    "pp",
    "dcp",
    "max_model_len",
    "max_num_batched_tokens",
    "block_size",
    "speculative_tokens",
    "logits_mb",
}
_FLAGS = {"batch_invariant": {"1"}, "calculate_kv_scales": {"True"}}


@dataclass(slots=True)
class Facts:
    """Values by name and where each came from. ``of_log`` leaves out what was asked of this machine."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, source: str, values: Mapping[str, Fact]) -> None:
        """Add what is known from ``source``; what stronger sources said before stays."""
        for name, value in values.items():
            if value is not None and name not in self.values:
                self.values[name], self.sources[name] = value, source

    @property
    def of_log(self) -> dict[str, Any]:
        """Without what this machine and its packages say."""
        return {name: value for name, value in self.values.items() if self.sources[name] not in {"machine", "packages"}}


def from_log(report: LogReport) -> dict[str, Fact]:
    """Settings that the engine printed, as facts."""
    found: dict[str, Fact] = {}
    for name, text in report.facts.items():
        plain = name.removeprefix("max:")
        if plain in _NUMBERS or plain == "prompt_tokens":
            match = _INT.match(text)
            found[plain] = int(match.group()) if match else None
        elif plain in _FLAGS:
            found[plain] = text in _FLAGS[plain]
        else:
            found[plain] = True if plain == "hisparse" else text.rstrip(".,)")
    if "version:vllm" in found:
        found["engine"] = "vllm"
    elif "version:sglang" in found:
        found["engine"] = "sglang"
    candidates = str(found.get("candidates", ""))
    if "ROCM_" in candidates:
        found["vendor"] = "amd"
    return {**device_facts(str(found["arch"])), **found} if "arch" in found else found


def from_machine(machine: Machine, packages: Mapping[str, str]) -> dict[str, Fact]:
    """Device and package versions; the engine is vLLM when it is installed, else SGLang when that is."""
    engine = next((name for name in ("vllm", "sglang", "tensorrt-llm", "transformers") if name in packages), None)
    versions = {f"version:{name}": version for name, version in packages.items()}
    return {**device_facts(machine.arch), "vendor": machine.vendor, "engine": engine, **versions}


def device_facts(arch: str) -> dict[str, Fact]:
    """What an architecture's name says: vendor, and the compute capability of NVIDIA parts."""
    number = arch.removeprefix("sm")
    nvidia = arch.startswith("sm") and number.isascii() and number.isdecimal()
    vendor = "nvidia" if nvidia else "amd" if arch.startswith("gfx") else "cpu" if arch == "cpu" else None
    return {"arch": arch, "vendor": vendor, "sm": int(number[:4]) if nvidia else None}


def from_environment() -> dict[str, Fact]:
    """Engine variables set in this shell."""
    budget = os.environ.get(_LOGITS_VARIABLE, "")
    return {
        "logits_mb": int(budget) if _INT.fullmatch(budget) else None,
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT") == "1" or None,
    }


def from_plugins(builds: Mapping[str, str], *, registered: bool) -> dict[str, Fact]:
    """What keeps an installed plugin from serving here: vLLM is told not to load it, or is two vLLMs in one folder.

    Args:
        builds: version of every build of vLLM that is installed, by its name.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    excluded = registered and allowed is not None and _PLUGIN not in allowed.split(",")
    return {"plugin_excluded": excluded or None, "engine_versions": len(set(builds.values())) or None}


def plugin_mode() -> str:
    """SPARSE_MLA_VLLM as set here; a value that is not allowed counts as its default, and is told elsewhere."""
    try:
        return str(envs.get("SPARSE_MLA_VLLM"))
    except UsageError:
        return "fallback"


def from_config(path: str, *, tp: int, pp: int) -> tuple[dict[str, Fact], list[str]]:
    """Facts of a model config, and what is wrong with it.

    Raises:
        ConfigError: missing, too large or not a JSON object.
    """
    fields = read_config(path)
    notes: list[str] = []
    model_type = str(fields.get("model_type", ""))[:64]
    dsa = model_type in MODEL_TYPES or "index_topk" in fields
    topk = _size(fields, "index_topk")
    if dsa and topk is None:
        topk = _DEFAULT_TOPK
        notes.append(
            f"config has no usable index_topk: its config class fills in {_DEFAULT_TOPK}, so the model is sparse"
        )
    heads = _size(fields, "num_attention_heads")
    quantisation = fields.get("quantization_config")
    facts: dict[str, Fact] = {
        "dsa": dsa,
        "model_type": model_type,
        "index_topk": topk if dsa else None,
        "num_attention_heads": heads,
        "heads_per_rank": heads // tp if heads and heads % tp == 0 else None,
        "quant_method": str(quantisation.get("quant_method", ""))[:32] if isinstance(quantisation, dict) else None,
        "dtype": str(fields.get("dtype") or fields.get("torch_dtype") or "")[:16] or None,
    }
    sizes = ("kv_lora_rank", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "num_hidden_layers")
    facts |= {name: _size(fields, name, least=0) for name in sizes}
    if heads and heads % tp:
        notes.append(f"{heads} attention heads do not divide by TP = {tp}")
    if dsa:
        facts |= _schedule_facts(fields, pp, notes)
    return facts, notes


def _schedule_facts(fields: Mapping[str, Any], pp: int, notes: list[str]) -> dict[str, Fact]:
    try:
        owns = indexer_schedule(fields)
    except ConfigError as error:
        notes.append(str(error))
        return {}
    starts = stage_starts(len(owns), pp)
    return {
        "index_share": not all(owns),
        "stage_starts_shared": any(not owns[start] for start in starts),
        "indexer_layers": sum(owns),
    }


def stage_starts(num_layers: int, pp: int) -> list[int]:
    """First layer of each pipeline stage as vLLM splits by default: leftovers go to the stages before the last one."""
    sizes = [num_layers // pp] * pp
    for extra in range(num_layers % pp):
        sizes[-2 - extra] += 1
    return [sum(sizes[:stage]) for stage in range(pp) if sizes[stage]]


def _size(fields: Mapping[str, Any], key: str, *, least: int = 1) -> int | None:
    value = fields.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= 1 << 31 else None
