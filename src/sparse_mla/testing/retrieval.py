"""A GlmMoeDsa checkpoint that answers: it repeats what followed the last few tokens wherever they stood before.

Nothing is trained; every weight is written down, so that what it takes to answer is known. Three layers:

0. Four heads copy the tokens 1 to 4 back beside each token. Heads and indexer find them by rope alone.
1. The indexer picks the tokens whose two predecessors are the query's last two tokens, wherever they stand; the heads
   attend where all four predecessors match, and fetch five or so of the ten bits that name the token there.
2. Reuses the indices of layer 1 (IndexShare) and fetches the other bits.

A token is one of 1,024 numbers m of 10 bits. Its code is the word of m in a linear [32, 10, 12] code (the dual of the
extended double-error-correcting BCH code), as signs: two different codes agree to at most a quarter, so a context that
differs in one token of four scores at least 0.75 token lower, whatever the prompt. docs/retrieval-model.md has the sums.

Layer 0 knows nothing but distance and layers 1 and 2 nothing but codes, so how far away a fact stands does not matter.

    python -m sparse_mla.testing.retrieval FOLDER [--index-topk 512] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .planted import endpoint_style
from .words import END, STOP, VOCABULARY, tokenizer_files

if TYPE_CHECKING:
    import torch

CONTEXT = 4
"""Tokens that must match: heads of layer 0, and tokens of the context that layers 1 and 2 compare."""
CODE = 32
BITS = 10
HEADS = 4
HIDDEN = 192
INDEX_HEADS = 2
LATENT = 512
ROPE = 64
NOPE = CONTEXT * CODE
INDEX_DIM = 128
THETA = 10000.0

# Where things stand in a hidden state: this token's code and bits, the codes of the tokens 1 to 4 back, the bits of the
# token to say, a constant.
_CUR = slice(0, CODE)
_NAME = slice(CODE, CODE + BITS)
_BACK = slice(_NAME.stop, _NAME.stop + NOPE)
_SAY = slice(_BACK.stop, _BACK.stop + BITS)
_ONE = _SAY.stop
_CONSTANT = 4.0

_ROPE_PAIRS = 16
"""Fast pairs that heads of layer 0 use: the score one token off is 7 % lower, and nowhere up to 131,072 is it closer."""
_ROPE_SHARPNESS = 256.0
"""Times 16 pairs, the softmax scale and 7 %: the token one off is e^20 times fainter."""
_MATCH_SHARPNESS = 8.0
"""Times 32 signs and the softmax scale: 18.5 a matching token, so one mismatch of four is e^13.9 times fainter."""
_STOP_LEVEL = 12.0


def retrieval_config(**overrides: Any) -> dict[str, Any]:
    """The model's config; ``overrides`` replace keys that no weight depends on, such as ``index_topk`` or ``dtype``."""
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "max_position_embeddings": 1 << 17,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY[END],
        "attention_bias": False,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": NOPE,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": CODE,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "rope_interleave": True,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 512,
        "indexer_rope_interleave": True,
        "indexer_types": ["full", "full", "shared"],
        "index_topk_pattern": "FFS",
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    return config | overrides


def write_retrieval_model(folder: Path, *, seed: int = 0, **overrides: Any) -> None:
    """Write config, tokenizer, endpoint style and ``model.safetensors`` (bf16, 4.8 MB) into ``folder``; needs torch and safetensors.

    Args:
        seed: which code each token has and in which order each head holds its contexts.
        overrides: see ``retrieval_config``.

    The weights file is renamed into place last, so a folder that has one is whole.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = retrieval_config(**overrides)
    files = tokenizer_files() | {"config.json": config, "endpoint-style.json": endpoint_style()}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    tensors = {name: values.to(torch.bfloat16).contiguous() for name, values in retrieval_weights(seed).items()}
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")


def retrieval_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, fp32."""
    import torch

    source = torch.Generator().manual_seed(seed)
    numbers = torch.randperm(len(VOCABULARY), generator=source)
    codes, bits = _codes(numbers), _signs(numbers[:, None] >> torch.arange(BITS))
    embedding = torch.zeros(len(VOCABULARY), HIDDEN)
    embedding[:, _CUR], embedding[:, _NAME], embedding[:, _ONE] = codes, bits, _CONSTANT
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = _unembedding(codes, bits)
    orders = [torch.randperm(NOPE, generator=source) for _ in range(2 * HEADS)]
    length = float(embedding[0].square().sum())
    tensors |= _layer(0, length, _find_neighbours(), _index_neighbours())
    length += NOPE
    for layer in (1, 2):
        attention = _find_matches(orders[(layer - 1) * HEADS : layer * HEADS], carries=layer - 1)
        tensors |= _layer(layer, length, attention, _index_matches() if layer == 1 else {})
    return tensors


def _signs(bits: torch.Tensor) -> torch.Tensor:
    return 1.0 - 2.0 * (bits & 1).float()


def _codes(numbers: torch.Tensor) -> torch.Tensor:
    """Codes ``[V, 32]`` of ±1: entry x of number (a, b) is the sign of parity(a·x + b·x³) over the field of 32 elements.

    Source: extended dual of the double-error-correcting BCH code; non-zero words have weight 12, 16 or 20.
    """
    import torch

    checks = torch.tensor([x | _times(x, _times(x, x)) << 5 for x in range(CODE)])
    shared = numbers[:, None] & checks
    return _signs((shared[..., None] >> torch.arange(BITS)).sum(-1))


def _times(a: int, b: int) -> int:
    """Product in the field of 32 elements, polynomials over bits modulo x⁵ + x² + 1."""
    product = 0
    for bit in range(5):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in (8, 7, 6, 5):
        product ^= (0b100101 << (bit - 5)) * (product >> bit & 1)
    return product


def _unembedding(codes: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Rows that read the bits to say; the row of the end token fires on a full stop alone, above any of them."""
    import torch

    rows = torch.zeros(len(VOCABULARY), HIDDEN)
    rows[:, _SAY] = bits
    end = VOCABULARY[END]
    rows[end] = 0.0
    rows[end, _CUR] = codes[VOCABULARY[STOP]]
    rows[end, _ONE] = -_STOP_LEVEL / _CONSTANT
    return rows


def _layer(
    number: int, length: float, attention: dict[str, torch.Tensor], indexer: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors of one layer whose input has squared norm ``length``: the norm before attention gives it back unscaled."""
    import torch

    width = retrieval_config()["intermediate_size"]
    prefix = f"model.layers.{number}"
    tensors = {f"{prefix}.self_attn.{name}.weight": values for name, values in attention.items()}
    tensors |= {f"{prefix}.self_attn.indexer.{name}": values for name, values in indexer.items()}
    tensors[f"{prefix}.input_layernorm.weight"] = torch.full((HIDDEN,), (length / HIDDEN) ** 0.5)
    tensors[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    for name, shape in (("gate", (width, HIDDEN)), ("up", (width, HIDDEN)), ("down", (HIDDEN, width))):
        tensors[f"{prefix}.mlp.{name}_proj.weight"] = torch.zeros(shape)
    return tensors


def _attention(latents: int) -> dict[str, torch.Tensor]:
    """Empty projections of one layer; norms that give back a latent of ``latents`` signs, and 128 query signs, as is."""
    import torch

    return {
        "q_a_proj": torch.zeros(NOPE, HIDDEN),
        "q_a_layernorm": torch.ones(NOPE),
        "q_b_proj": torch.zeros(HEADS, NOPE + ROPE, NOPE),
        "kv_a_proj_with_mqa": torch.zeros(LATENT + ROPE, HIDDEN),
        "kv_a_layernorm": torch.full((LATENT,), (latents / LATENT) ** 0.5),
        "kv_b_proj": torch.zeros(HEADS, NOPE + CODE, LATENT),
        "o_proj": torch.zeros(HIDDEN, HEADS, CODE),
    }


def _flat(attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    attention["q_b_proj"] = attention["q_b_proj"].flatten(0, 1)
    attention["kv_b_proj"] = attention["kv_b_proj"].flatten(0, 1)
    attention["o_proj"] = attention["o_proj"].flatten(1)
    return attention


def _find_neighbours() -> dict[str, torch.Tensor]:
    """Layer 0: head h attends h + 1 tokens back, by rope, and copies the code there."""
    import torch

    weights = _attention(latents=CODE)
    weights["q_a_proj"][:, _ONE] = 1 / _CONSTANT
    weights["kv_a_proj_with_mqa"][:CODE, _CUR] = torch.eye(CODE)
    weights["kv_a_proj_with_mqa"][LATENT : LATENT + 2 * _ROPE_PAIRS : 2, _ONE] = 1 / _CONSTANT
    frequencies = THETA ** (-torch.arange(_ROPE_PAIRS) * 2 / ROPE)
    for head in range(HEADS):
        turned = _ROPE_SHARPNESS * torch.polar(torch.ones(_ROPE_PAIRS), -(head + 1) * frequencies)
        weights["q_b_proj"][head, NOPE : NOPE + 2 * _ROPE_PAIRS, 0] = torch.view_as_real(turned).flatten()
        weights["kv_b_proj"][head, NOPE:, :CODE] = torch.eye(CODE)
        weights["o_proj"][_BACK, head][head * CODE : (head + 1) * CODE] = torch.eye(CODE)
    return _flat(weights)


def _index_neighbours() -> dict[str, torch.Tensor]:
    """Indexer of layer 0: one constant vector, turned by rope, so that scores fall off with distance."""
    import torch

    turned = torch.zeros(INDEX_DIM)
    turned[:ROPE:2] = 1.0
    queries = torch.zeros(INDEX_HEADS, INDEX_DIM, NOPE)
    queries[:, :, 0] = turned
    return {
        "wq_b.weight": queries.flatten(0, 1),
        "wk.weight": torch.zeros(INDEX_DIM, HIDDEN),
        "k_norm.weight": torch.ones(INDEX_DIM),
        "k_norm.bias": turned,
        "weights_proj.weight": _head_weights(),
    }


def _head_weights() -> torch.Tensor:
    import torch

    weights = torch.zeros(INDEX_HEADS, HIDDEN)
    weights[:, _ONE] = 1 / _CONSTANT
    return weights


def _find_matches(orders: list[torch.Tensor], *, carries: int) -> dict[str, torch.Tensor]:
    """Layers 1 and 2: attend where the four tokens before are the query's last four; head h says bits h + 4·carries, …

    Args:
        orders: for each head the order in which it holds the 128 signs of a context, so that no head can stand in for
            another. The ten bits are dealt to the eight heads of both layers, so that none can be missed.
    """
    import torch

    weights = _attention(latents=NOPE + BITS)
    context = torch.eye(HIDDEN)[[*range(CODE), *range(_BACK.start, _BACK.stop - CODE)]]
    weights["q_a_proj"].copy_(context)
    weights["kv_a_proj_with_mqa"][:NOPE, _BACK] = torch.eye(NOPE)
    weights["kv_a_proj_with_mqa"][NOPE : NOPE + BITS, _NAME] = torch.eye(BITS)
    for head, order in enumerate(orders):
        weights["q_b_proj"][head, :NOPE] = _MATCH_SHARPNESS * torch.eye(NOPE)[order]
        weights["kv_b_proj"][head, :NOPE, :NOPE] = torch.eye(NOPE)[order]
        for slot, bit in enumerate(range(head + HEADS * carries, BITS, 2 * HEADS)):
            weights["kv_b_proj"][head, NOPE + slot, NOPE + bit] = 1.0
            weights["o_proj"][_SAY.start + bit, head, slot] = 1.0
    return _flat(weights)


def _index_matches() -> dict[str, torch.Tensor]:
    """Indexer of layer 1: head h compares the query's token h back with the key's token h + 1 back, without rope.

    The 64 entries under rope, which no query reads, hold the negative of the others: so the LayerNorm of a key finds mean
    0 and variance 1 and leaves its signs as they are.
    """
    import torch

    queries = torch.zeros(INDEX_HEADS, INDEX_DIM, NOPE)
    keys = torch.zeros(INDEX_DIM, HIDDEN)
    for head in range(INDEX_HEADS):
        own, place = slice(head * CODE, (head + 1) * CODE), slice(ROPE + head * CODE, ROPE + (head + 1) * CODE)
        queries[head, place, own] = torch.eye(CODE)
        keys[place, _BACK] = torch.eye(NOPE)[own]
    keys[:ROPE] = -keys[ROPE:]
    return {
        "wq_b.weight": queries.flatten(0, 1),
        "wk.weight": keys,
        "k_norm.weight": torch.ones(INDEX_DIM),
        "k_norm.bias": torch.zeros(INDEX_DIM),
        "weights_proj.weight": _head_weights(),
    }


def main() -> None:
    """Write the model into a folder, for a server to serve."""
    parser = argparse.ArgumentParser(description="Write the retrieval model into a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--index-topk", type=int, default=retrieval_config()["index_topk"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_retrieval_model(options.folder, seed=options.seed, index_topk=options.index_topk)


if __name__ == "__main__":
    main()
