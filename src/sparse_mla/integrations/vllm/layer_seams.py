"""The seams inside a forward pass: classes, layers, caches, steps and operators. See ``seams``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from .contract import Demand, seam
from .seams import CHECKED, first_time

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_INDEXER_MODEL = "model_executor/models/deepseek_v2.py"
_MLA_LAYER = "model_executor/layers/attention/mla_attention.py"
_BACKEND = "v1/attention/backend.py"


class Bases(NamedTuple):
    """vLLM's classes that an MLA backend is made of."""

    backend: Any
    impl: Any
    builder: Any
    metadata: Any


@seam(
    checked=CHECKED,
    ends="never: this is the interface of an attention backend",
    demands=(
        Demand(
            file=_BACKEND,
            name="AttentionBackend",
            mentions=("supported_dtypes", "supported_kv_cache_dtypes", "is_sparse"),
        ),
        Demand(file=_BACKEND, name="MLAAttentionImpl.forward_mqa", accepts=("q", "attn_metadata", "layer")),
        Demand(
            file=_BACKEND,
            name="MLAAttentionImpl.do_kv_cache_update",
            accepts=("kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
        ),
        Demand(file=_BACKEND, name="AttentionImplBase", mentions=("is_sparse", "supports_dense_mha_prefill")),
        Demand(
            file=_BACKEND,
            name="AttentionMetadataBuilder.__init__",
            accepts=("kv_cache_spec", "layer_names", "vllm_config", "device"),
        ),
        Demand(file=_BACKEND, name="AttentionMetadataBuilder.build", accepts=("common_attn_metadata", "fast_build")),
        # What the layer asks of an impl and of metadata without any base class saying so.
        Demand(
            file=_MLA_LAYER,
            name="MLAAttention.__init__",
            mentions=("self.impl.is_sparse", "self.impl.supports_dense_mha_prefill", "indexer=", "kv_cache_dtype="),
        ),
        Demand(
            file=_MLA_LAYER,
            name="MLAAttention.forward_impl",
            mentions=(
                "attn_metadata.num_actual_tokens",
                "attn_metadata.num_decodes",
                "attn_metadata.num_prefills",
                "attn_metadata.num_decode_tokens",
                "self.impl.forward_mqa",
            ),
        ),
        Demand(file=_MLA_LAYER, name="MLAAttention.update_kv_cache", mentions=("self.impl.do_kv_cache_update",)),
        Demand(
            file=_MLA_LAYER,
            name="MLAAttention.process_weights_after_loading",
            mentions=("self.impl.process_weights_after_loading",),
        ),
        Demand(
            file="model_executor/layers/mla.py",
            name="MultiHeadLatentAttentionWrapper.forward",
            mentions=("self.mla_attn.impl.record_logical_topk_ready", "self.indexer", "self.skip_topk"),
        ),
    ),
)
def attention_bases() -> Bases:
    """The classes to derive from. The unwritten part of their contract stands in the demands above."""
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionMetadata,
        AttentionMetadataBuilder,
        MLAAttentionImpl,
    )

    return Bases(AttentionBackend, MLAAttentionImpl, AttentionMetadataBuilder, AttentionMetadata)


@seam(
    checked=CHECKED,
    ends="never: the layer hands its cache over",
    demands=(
        Demand(
            file=_INDEXER_MODEL,
            name="DeepseekV32IndexerCache",
            mentions=("self.kv_cache", "self.head_dim", "self.dtype", "self.prefix", "kv_cache.squeeze"),
        ),
        Demand(file=_INDEXER_MODEL, name="DeepseekV32IndexerCache.get_attn_backend"),
        Demand(
            file=_INDEXER_MODEL,
            name="DeepseekV32IndexerCache.get_kv_cache_spec",
            mentions=("head_size=", "self.head_dim", "dtype=", "self.dtype"),
        ),
    ),
)
def take_index_cache(k_cache: Any, width: int, dtype: torch.dtype, backend: type) -> str:
    """Give one layer's index cache our metadata builder and rows of ``width`` values of ``dtype``; returns its name.

    On the instance, so that layers which vLLM serves itself keep theirs.
    """
    k_cache.head_dim, k_cache.dtype = width, dtype
    k_cache.get_attn_backend = lambda: backend
    return str(k_cache.prefix)


@seam(
    checked=CHECKED,
    ends="vLLM's indexer takes an operator from the backend",
    demands=(
        Demand(
            file=_INDEXER_MODEL,
            name="Indexer.__init__",
            mentions=("self.indexer_op", "self.k_cache", "self.scale_fmt", "self.topk_indices_buffer"),
        ),
        Demand(
            file=_INDEXER_MODEL,
            name="Indexer.forward",
            mentions=("self.indexer_op", "per_token_group_quant_fp8", "weights", "q_scale", "self.softmax_scale"),
        ),
        # Where CPUs get their DSA models from; CUDA and ROCm have modules of their own, which bypass this seam.
        Demand(file="models/deepseek_v32/__init__.py", mentions=("from vllm.model_executor.models.deepseek_v2",)),
        Demand(file=_INDEXER_MODEL, name="DeepseekV2MLAAttention.__init__", mentions=("indexer=", "self.indexer")),
        Demand(
            file="model_executor/layers/mla.py", name="MultiHeadLatentAttentionWrapper.__init__", mentions=("indexer=",)
        ),
        Demand(
            file="v1/spec_decode/llm_base_proposer.py",
            mentions=("module.topk_indices_buffer", "self.model.model.named_modules"),
        ),
    ),
)
def take_indexer(indexer: Any, operator: torch.nn.Module) -> None:
    """Put ``operator(hidden_states, q, k, weights)`` in the place of one layer's indexer operator.

    vLLM's indexer quantises its queries with a kernel that CPUs do not have, and always to fp8. From here on, on CPU,
    they pass through it unchanged with scale 1, and the operator decides. Where vLLM shares one index buffer with a
    draft model it repoints ``topk_indices_buffer`` of every module that has one, ours too.
    """
    import torch
    from vllm.model_executor.models import deepseek_v2

    indexer.indexer_op = operator
    native = deepseek_v2.per_token_group_quant_fp8
    if not first_time("per_token_group_quant_fp8"):
        return

    @functools.wraps(native)
    def per_token_group_quant_fp8(x: torch.Tensor, group_size: int, *args: Any, **kwargs: Any) -> Any:
        if x.device.type != "cpu":
            return native(x, group_size, *args, **kwargs)
        return x, torch.ones(*x.shape[:-1], 1, dtype=torch.float32)

    deepseek_v2.per_token_group_quant_fp8 = per_token_group_quant_fp8


@seam(
    checked=CHECKED,
    ends="never: a forward pass has a context",
    demands=(
        Demand(
            file="model_executor/layers/attention/attention.py",
            name="get_attention_context",
            accepts=("layer_name",),
            mentions=("forward_context.no_compile_layers", "attn_layer.kv_cache"),
        ),
    ),
)
def layer_context(layer_name: str) -> tuple[Any, Any]:
    """Metadata of this pass (None in a profiling run) and the layer object, which holds its cache as ``kv_cache``."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    metadata, layer, _, _ = get_attention_context(layer_name)
    return metadata, layer


class Step(NamedTuple):
    """One scheduler step. Host lists are what vLLM knows without waiting for the device; device tensors decide."""

    num_tokens: int
    query_lens: list[int]
    seq_lens_bound: list[int]
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@seam(
    checked=CHECKED,
    ends="never: a step has metadata",
    demands=(
        Demand(
            file=_BACKEND,
            name="CommonAttentionMetadata",
            mentions=(
                "num_reqs",
                "num_actual_tokens",
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "block_table_tensor",
                "slot_mapping",
            ),
        ),
    ),
)
def step_of(common: Any) -> Step:
    """What vLLM says about a step: ``query_start_loc [R + 1] i32``, ``seq_lens [R] i32``, ``block_table [R, B] i32``,
    ``slot_mapping [T] i64``.
    """
    bound = common.seq_lens_cpu_upper_bound
    if bound is None:
        bound = common.seq_lens.cpu()
    requests = common.num_reqs
    return Step(
        num_tokens=common.num_actual_tokens,
        query_lens=common.query_start_loc_cpu[: requests + 1].diff().tolist(),
        seq_lens_bound=bound[:requests].tolist(),
        query_start_loc=common.query_start_loc[: requests + 1],
        seq_lens=common.seq_lens[:requests],
        block_table=common.block_table_tensor[:requests],
        slot_mapping=common.slot_mapping[: common.num_actual_tokens],
    )


@seam(
    checked=CHECKED,
    ends="a prompt with a seed survives chunked prefill on vLLM's CPU platform",
    demands=(
        Demand(
            file="v1/worker/gpu_model_runner.py",
            name="GPUModelRunner.sample_tokens",
            accepts=("grammar_output",),
            mentions=("self._sample", "self._bookkeeping_sync"),
        ),
        Demand(
            file="v1/worker/gpu_model_runner.py",
            name="GPUModelRunner._bookkeeping_sync",
            mentions=("self.discard_request_mask.np", "self.input_batch.generators.get", "self.input_batch.num_reqs"),
        ),
        Demand(
            file="v1/worker/gpu_input_batch.py",
            name="InputBatch._make_sampling_metadata",
            mentions=("generators=", "self.generators"),
        ),
    ),
)
def draw_once_read() -> None:
    """Let a request with a seed draw nothing while its prompt is still being read.

    vLLM draws a token in every step, throws it away until the prompt is whole, and winds the generator back; torch's
    generators on a CPU cannot be wound back, so the first such prompt that takes two steps would end the engine.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    native = GPUModelRunner.sample_tokens
    if not first_time("sample_tokens"):
        return

    @functools.wraps(native)
    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        held = {row: generators.pop(row) for row in unread if row in generators}
        try:
            return native(runner, *args, **kwargs)
        finally:
            generators.update(held)

    GPUModelRunner.sample_tokens = sample_tokens


@seam(
    checked=CHECKED,
    ends="never: operators that a compiler must not look into are registered",
    demands=(
        Demand(
            file="utils/torch_utils.py",
            name="direct_register_custom_op",
            accepts=("op_name", "op_func", "mutates_args", "fake_impl", "target_lib"),
        ),
    ),
)
def define_operator(library: torch.library.Library, function: Callable[..., None], mutates: str) -> None:
    """Register ``function`` as an operator of our own library that changes one argument and returns nothing."""
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(
        op_name=function.__name__,
        op_func=function,
        mutates_args=[mutates],
        fake_impl=lambda *_args: None,
        target_lib=library,
    )
