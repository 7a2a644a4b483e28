"""MLADims: the sizes of a DSA model, read from its Hugging Face config, and which layers own an indexer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODEL_TYPES = ("glm_moe_dsa", "deepseek_v32")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DIM = 1 << 20
_DEFAULT_TOPK = 2048  # what Transformers' GlmMoeDsaConfig and DeepseekV32Config fill in when the key is absent


@dataclass(frozen=True, kw_only=True, slots=True)
class MLADims:
    """Sizes of one tensor-parallel rank. ``num_heads`` is per rank; index heads are replicated on every rank.

    ``owns_indexer[i]`` says whether layer i runs its own indexer; a layer that does not reuses the indices of the
    nearest earlier layer that does (IndexShare).
    """

    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    owns_indexer: tuple[bool, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers, without multi-token-prediction layers."""
        return len(self.owns_indexer)

    @property
    def head_dim(self) -> int:
        """Width of a latent row and of an absorbed query: D_c + D_r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(d) with d the width of a head before absorption (without any YaRN correction)."""
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, *, tensor_parallel: int = 1) -> MLADims:
        """Read a config mapping, a ``config.json`` or a folder that holds one.

        Raises:
            ConfigError: missing or unreadable file, not a DSA model, an absurd or contradictory value.
        """
        fields = config if not isinstance(config, (str, Path)) else read_config(config)
        model_type = fields.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError("model_type", needs=" or ".join(MODEL_TYPES), got=repr(model_type), hint="Not DSA.")
        heads = _size(fields, "num_attention_heads")
        if tensor_parallel < 1 or heads % tensor_parallel:
            raise ConfigError("num_attention_heads", needs=f"a multiple of TP = {tensor_parallel}", got=heads)
        return cls(
            num_heads=heads // tensor_parallel,
            kv_lora_rank=_size(fields, "kv_lora_rank"),
            qk_rope_head_dim=_size(fields, "qk_rope_head_dim", least=0),
            qk_nope_head_dim=_size(fields, "qk_nope_head_dim"),
            v_head_dim=_size(fields, "v_head_dim"),
            index_n_heads=_size(fields, "index_n_heads"),
            index_head_dim=_size(fields, "index_head_dim"),
            index_topk=_size(fields, "index_topk", default=_DEFAULT_TOPK),
            owns_indexer=indexer_schedule(fields),
        )


def read_config(path: str | Path) -> dict[str, Any]:
    """The JSON object in ``path`` (a file, or a folder with a config.json).

    Raises:
        ConfigError: missing, too large, or not a JSON object.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{file} is too large", needs=f"at most {_MAX_CONFIG_BYTES} bytes")
        fields = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read {file} ({error.strerror})", hint="Give a model folder or its config.json."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON", got=str(error)[:120]) from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{file}", needs="a JSON object", got=type(fields).__name__)
    return fields


def _size(fields: Mapping[str, Any], key: str, *, least: int = 1, default: int | None = None) -> int:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_DIM:
        raise ConfigError(f"config key {key}", needs=f"a whole number from {least} to {_MAX_DIM}", got=repr(value))
    return value


def indexer_schedule(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers own an indexer.

    A config may state it as ``indexer_types`` (a list of "full" and "shared"), as ``index_topk_pattern`` ("FSS...") or
    as ``index_topk_freq`` with ``index_skip_topk_offset``; vLLM reads the last two and Transformers all three, so all
    that are present must agree.

    Raises:
        ConfigError: the statements disagree, have the wrong length, or the first layer would have nothing to reuse.
    """
    layers = _size(fields, "num_hidden_layers")
    stated: dict[str, tuple[bool, ...]] = {}
    types, pattern = fields.get("indexer_types"), fields.get("index_topk_pattern")
    if types is not None:
        stated["indexer_types"] = _letters("indexer_types", types, {"full": True, "shared": False}, layers)
    if pattern is not None:
        stated["index_topk_pattern"] = _letters("index_topk_pattern", pattern, {"F": True, "S": False}, layers)
    if pattern is None and fields.get("index_topk_freq") is not None:
        freq = _size(fields, "index_topk_freq")
        offset = _size(fields, "index_skip_topk_offset", least=0, default=2)
        stated["index_topk_freq"] = tuple(max(i - offset + 1, 0) % freq == 0 for i in range(layers))
    schedules = list(stated.items()) or [("default", (True,) * layers)]
    name, schedule = schedules[0]
    for other, theirs in schedules[1:]:
        if theirs != schedule:
            layer = next(i for i in range(layers) if theirs[i] != schedule[i])
            raise ConfigError(
                f"{name} and {other} disagree at layer {layer}",
                hint="Engines read different keys: make them equal, or some layers reuse stale indices.",
            )
    if not schedule[0]:
        raise ConfigError(f"{name}: layer 0", needs="an indexer of its own", got="shared", hint="Nothing to reuse.")
    return schedule


def _letters(key: str, value: str | Sequence[str], meaning: Mapping[str, bool], layers: int) -> tuple[bool, ...]:
    letters = value if isinstance(value, (str, list, tuple)) else [None]
    if not all(isinstance(letter, str) and letter in meaning for letter in letters):
        raise ConfigError(f"config key {key}", needs=f"only {' and '.join(meaning)}", got=str(value)[:60])
    if len(value) < layers:
        raise ConfigError(f"config key {key}", needs=f"{layers} layers", got=len(value))
    return tuple(meaning[item] for item in value[:layers])
