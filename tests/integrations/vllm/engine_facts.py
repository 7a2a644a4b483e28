"""What a tiny engine states of itself, for tests without vLLM."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparse_mla.integrations.vllm import seams
from sparse_mla.testing.tiny_model import tiny_config


def engine(**changes) -> seams.Engine:
    facts = seams.Engine(
        fields=tiny_config(),
        dtype=torch.bfloat16,
        fp8="fp8",
        device=torch.device("cpu"),
        kv_cache_dtype="auto",
        mixed_kv_cache=False,
        block_size=16,
        max_num_tokens=512,
        max_num_requests=8,
        max_model_len=4096,
        tensor_parallel=1,
        decode_context_parallel=1,
        prefill_context_parallel=1,
        kv_connector=None,
        batch_invariant=False,
    )
    return replace(facts, **changes)
