"""The attention of one MLA layer: writes latents, attends over the selected rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...cache import CacheView
from ...errors import ConfigError
from . import seams, trace
from .engine_plan import plan_for
from .indexer import adopt
from .layer_seams import attention_bases, draw_once_read
from .runtime import Runtime, require_schedule

if TYPE_CHECKING:
    from .metadata import SparseMLAMetadata

_BASE: Any = attention_bases().impl


class SparseMLAImpl(_BASE):
    """Bound to one layer; no request ever waits for anything here but the operators themselves."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *args: Any,
        topk_indices_buffer: torch.Tensor,
        indexer: Any = None,
        **kwargs: Any,
    ) -> None:
        del num_kv_heads, args, kwargs
        engine = seams.current_engine()
        plan = plan_for(engine)
        dims = plan.problem.dims
        if (num_heads, head_size) != (dims.num_heads, dims.head_dim):
            raise ConfigError(
                "heads per rank and width of a latent row",
                needs=(dims.num_heads, dims.head_dim),
                got=(num_heads, head_size),
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self._runtime = Runtime.of(plan, engine.device)
        self._format = plan.problem.latent
        self._indexer, self._buffer = indexer, topk_indices_buffer
        self._layer_names = seams.layer_names()
        self._require_schedule()  # here, too: vLLM's loader would stop at the weights of an indexer that is none
        if plan.device.kind == "cpu":
            draw_once_read()
        if indexer is not None:
            adopt(indexer, self._runtime)

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """``[max tokens, K] i32``, resolved at every read: vLLM repoints an indexer's when models share one."""
        buffer: torch.Tensor = self._buffer if self._indexer is None else self._indexer.topk_indices_buffer
        return buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: torch.Tensor) -> None:
        self._indexer, self._buffer = None, buffer

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called in every worker once the model is loaded and before it sizes the cache."""
        del act_dtype
        self._require_schedule()
        self._runtime.prove()

    def _require_schedule(self) -> None:
        require_schedule(self._runtime.plan.problem.dims, seams.indexers_built(self._layer_names))

    def record_logical_topk_ready(self) -> None:
        """Everything runs on one stream: nothing to signal."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write ``kv_c_normed [T, D_c]`` and ``k_pe [T, 1, D_r]``; the cache is empty in a profiling run."""
        del args, kwargs
        if kv_cache.numel():
            view = CacheView.of(kv_cache, self._format)
            self._runtime.attention.write_latent(kv_c_normed, k_pe.squeeze(1), view, slot_mapping.flatten())

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """``[T, H, D_c]`` for absorbed queries, given whole or as (``ql_nope [T, H, D_c]``, ``q_pe [T, H, D_r]``)."""
        queries = torch.cat(q, -1) if isinstance(q, tuple) else q
        indices = self.topk_indices_buffer
        batch = attn_metadata.batch
        view = CacheView.of(kv_c_and_k_pe_cache, self._format)
        out = self._runtime.attention.attend(queries, view, indices[: batch.num_tokens], batch, self.scale).out
        if attn_metadata.trace_requests is not None:
            trace.record(attn_metadata, layer.layer_name, latent_cache=view, output=out)
        return out, None
