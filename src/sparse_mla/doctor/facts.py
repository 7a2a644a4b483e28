"""Facts: what rules and formulas of the knowledge base read. Each has one source; flags beat the log, the log the machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import envs
from ..dims import MODEL_TYPES, indexer_schedule, read_config
from ..errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .environment import Machine
    from .expressions import Fact

DEFAULT_LOGITS_MB = 512  # vLLM's VLLM_SPARSE_INDEXER_MAX_LOGITS_MB when nobody sets it
LOGITS_VARIABLE = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
_DEFAULT_TOPK = 2048
_PLUGIN = "sparse_mla"
_INT = re.compile(r"\d{1,15}")


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
    budget = os.environ.get(LOGITS_VARIABLE, "")
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
