"""The indexer operator of one layer: writes index keys, selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...cache import CacheView
from ...quantize import quantize_index_q
from ...shapes import DTYPE_NAMES
from . import layer_seams, trace

if TYPE_CHECKING:
    from .metadata import SparseMLAMetadata
    from .runtime import Runtime

_LIBRARY = torch.library.Library("sparse_mla", "FRAGMENT")


class IndexOperator(torch.nn.Module):
    """Stands where vLLM's SparseAttnIndexer stood; opaque to the model's compiler."""

    def __init__(self, layer_name: str, topk_indices_buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.topk_indices_buffer = topk_indices_buffer

    def forward(
        self, hidden_states: torch.Tensor, index_q: torch.Tensor, index_k: torch.Tensor, index_weights: torch.Tensor
    ) -> torch.Tensor:
        """Fill the index buffer for ``index_q [T, H_i, D_i]``, ``index_k [T, D_i]``, ``index_weights [T, H_i]``."""
        del hidden_states
        torch.ops.sparse_mla.vllm_index(index_q, index_k, index_weights, self.topk_indices_buffer, self.layer_name)
        return self.topk_indices_buffer


class IndexLayer:
    """What one layer's index cache needs at run time; kept on vLLM's cache object, whose life it shares."""

    def __init__(self, layer_name: str, runtime: Runtime) -> None:
        self._name = layer_name
        self._attention = runtime.attention
        self._format = runtime.plan.problem.index

    def run(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        index_weights: torch.Tensor,
        topk_indices: torch.Tensor,
        cache: torch.Tensor,
        metadata: SparseMLAMetadata,
    ) -> None:
        """Fill ``topk_indices [T, K] i32`` for one step; arguments may have padding rows beyond the metadata's."""
        tokens = metadata.num_actual_tokens
        view = CacheView.of(cache, self._format)
        self._attention.write_index(index_k[:tokens], view, metadata.slot_mapping)
        index_q, weights = index_q[:tokens], index_weights[:tokens].float()
        if self._format.rule is not None:
            index_q, scale = quantize_index_q(index_q, self._format.encoding)
            weights = weights * scale
        indices = self._attention.select(index_q, weights, view, metadata.batch, out=topk_indices[:tokens])
        if metadata.trace_requests is not None:
            trace.record(metadata, self._name, index_cache=view, selected=indices)


def adopt(indexer: Any, runtime: Runtime) -> None:
    """Take over one layer's indexer: its operator, its cache's rows and the metadata of its cache."""
    from .backend import SparseMLABackend

    row = runtime.plan.problem.index
    dtype = torch.uint8 if row.rule is not None else getattr(torch, DTYPE_NAMES[row.encoding])
    width = row.row_bytes // dtype.itemsize
    name = layer_seams.take_index_cache(indexer.k_cache, width, dtype, SparseMLABackend)
    indexer.k_cache.sparse_mla = IndexLayer(name, runtime)
    layer_seams.take_indexer(indexer, IndexOperator(name, indexer.topk_indices_buffer))


def vllm_index(
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    index_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    layer_name: str,
) -> None:
    """The operator behind ``torch.ops.sparse_mla.vllm_index``; changes ``topk_indices [T, K] i32`` and the cache."""
    metadata, layer = layer_seams.layer_context(layer_name)
    if metadata is not None:  # a profiling run has none: there is no cache yet
        layer.sparse_mla.run(index_q, index_k, index_weights, topk_indices, layer.kv_cache, metadata)


layer_seams.define_operator(_LIBRARY, vllm_index, mutates="topk_indices")
