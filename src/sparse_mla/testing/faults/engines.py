"""Faults of an engine's calls: they need its layers and its steps. Only for a process in which the engine runs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .fault import PASS, Fault, patched

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ...batch import BatchLayout

_PLUGIN = "sparse_mla.integrations.vllm"  # by name: this package lies below the integrations, which load an engine


@contextmanager
def _stale_shared_indices() -> Iterator[None]:
    """A layer without an indexer keeps the indices that it first saw in a step of as many tokens, as a captured graph."""
    impl = import_module(f"{_PLUGIN}.impl").SparseMLAImpl
    right = impl.forward_mqa
    kept: dict[tuple[str, int], torch.Tensor] = {}

    def stale(layer_impl: Any, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        tokens = metadata.batch.num_tokens
        if layer_impl._indexer is not None or tokens <= PASS:  # noqa: SLF001 (a fault needs the real site)
            return right(layer_impl, q, cache, metadata, layer)
        shared = layer_impl.topk_indices_buffer[:tokens]
        fresh = shared.clone()
        shared.copy_(kept.setdefault((layer.layer_name, tokens), fresh))
        try:
            return right(layer_impl, q, cache, metadata, layer)
        finally:
            shared.copy_(fresh)

    with patched(impl, "forward_mqa", stale):
        yield


@contextmanager
def _step_under_too_small_a_key() -> Iterator[None]:
    """The layout of a long step is kept under its sizes and whether something came before: wrong from the third chunk."""
    metadata = import_module(f"{_PLUGIN}.metadata")
    right = metadata.layout
    kept: dict[tuple[Any, ...], BatchLayout] = {}

    def cached(step: Any) -> BatchLayout:
        batch: BatchLayout = right(step)
        if batch.max_query_len <= PASS:
            return batch
        key = batch.query_lens, batch.seq_lens > batch.query_lens
        first = kept.setdefault(key, batch)
        return replace(batch, visible_lens=first.visible_lens)

    with patched(metadata, "layout", cached):
        yield


ENGINES = (
    Fault(
        name="stale-shared-indices",
        what="a layer that reuses another's indices reads those of an earlier step",
        stage="attend",
        nets=("plans",),
        inject=_stale_shared_indices,
        level="engine",
    ),
    Fault(
        name="step-under-too-small-a-key",
        what="an engine step's layout serves a later step: right for two chunks, wrong from the third",
        stage="select",
        nets=("plans",),
        inject=_step_under_too_small_a_key,
        level="engine",
    ),
)
