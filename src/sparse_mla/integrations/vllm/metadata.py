"""The metadata that vLLM carries from a scheduler step to the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import trace
from .layer_seams import attention_bases, step_of
from .layout import layout

if TYPE_CHECKING:
    import torch

    from ...batch import BatchLayout

_BASES = attention_bases()
_MetadataBase: Any = _BASES.metadata
_BuilderBase: Any = _BASES.builder


@dataclass(kw_only=True, slots=True)
class SparseMLAMetadata(_MetadataBase):
    """One step of one cache group.

    vLLM routes the first ``num_decode_tokens`` tokens to ``forward_mqa`` and the rest to dense attention; everything
    here takes the first way.

    Attributes:
        slot_mapping: ``[T] i64``, where each token's row goes; −1 for padding.
        trace_requests: the number of each request in a trace; None without one.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    batch: BatchLayout
    slot_mapping: torch.Tensor
    num_prefills: int = 0
    trace_requests: tuple[int, ...] | None = None


class SparseMLAMetadataBuilder(_BuilderBase):
    """Builds the metadata of every step for the layers of one cache group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._requests = trace.RequestNumbers() if trace.folder() else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMLAMetadata:
        """One step's metadata; vLLM calls this once a step for each cache group."""
        del common_prefix_len, fast_build
        step = step_of(common_attn_metadata)
        return SparseMLAMetadata(
            num_actual_tokens=step.num_tokens,
            num_decodes=len(step.query_lens),
            num_decode_tokens=step.num_tokens,
            batch=layout(step),
            slot_mapping=step.slot_mapping,
            trace_requests=self._requests.of(step) if self._requests else None,
        )
