"""A tiny GlmMoeDsa checkpoint with ordinary weights, valid for vLLM and for Transformers.

Weights are N(0, 0.05), norms 1 + N(0, 0.05): with the near-zero weights that engines call dummy, tokens and hashes agree
whatever is selected, so they test nothing. Every key that one of the two readers needs is stated: vLLM takes the
interleaved rope of the indexer, the router bias and the sigmoid router from the config, Transformers assumes them; and
the epsilon of the inner norms is 1e-6 in Transformers whatever the config says, so the config says that too.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..dims import indexer_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Shapes = Iterator[tuple[str, tuple[int, ...]]]

STD = 0.05


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Config of a three-layer model: one dense, two of experts; ``overrides`` replace or add keys."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "float32",
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "max_position_embeddings": 1 << 17,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "attention_bias": False,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_interleave": True,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
        "indexer_rope_interleave": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    return config | overrides


def write_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write ``config.json`` and ``model.safetensors`` (about 12 MB) into ``folder``; needs torch and safetensors.

    The weights file is renamed into place last, so a folder that has one is whole.
    """
    import torch
    from safetensors.torch import save_file

    config = tiny_config(**overrides)
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config):
        values = torch.randn(shape, generator=source, dtype=torch.float32) * STD
        tensors[name] = values + 1 if name.endswith("norm.weight") else values
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def tensor_shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every tensor of the checkpoint, in the order in which weights are drawn."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer, owns_indexer in enumerate(indexer_schedule(config)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield from _attention(f"{prefix}.self_attn", config)
        if owns_indexer:
            yield from _indexer(f"{prefix}.self_attn.indexer", config)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _experts(f"{prefix}.mlp", config)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _attention(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, values = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{prefix}.q_a_proj.weight", (config["q_lora_rank"], hidden)
    yield f"{prefix}.q_a_layernorm.weight", (config["q_lora_rank"],)
    yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), config["q_lora_rank"])
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + values), rank)
    yield f"{prefix}.o_proj.weight", (hidden, heads * values)


def _indexer(prefix: str, config: dict[str, Any]) -> Shapes:
    heads, dim = config["index_n_heads"], config["index_head_dim"]
    yield f"{prefix}.wq_b.weight", (heads * dim, config["q_lora_rank"])
    yield f"{prefix}.wk.weight", (dim, config["hidden_size"])
    yield f"{prefix}.k_norm.weight", (dim,)
    yield f"{prefix}.k_norm.bias", (dim,)
    yield f"{prefix}.weights_proj.weight", (heads, config["hidden_size"])


def _experts(prefix: str, config: dict[str, Any]) -> Shapes:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}.gate.weight", (config["n_routed_experts"], hidden)
    yield f"{prefix}.gate.e_score_correction_bias", (config["n_routed_experts"],)
    for expert in range(config["n_routed_experts"]):
        yield from _mlp(f"{prefix}.experts.{expert}", hidden, width)
    yield from _mlp(f"{prefix}.shared_experts", hidden, width * config["n_shared_experts"])


def _mlp(prefix: str, hidden: int, width: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)
