"""Faults of what lies in memory: written bytes, addresses, scratch."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...attention import SparseMLA
from ...backends.eager import attend, select, write
from ...backends.eager.gather import gather
from ...cache import index_fp8
from ...workspace import Workspace
from .fault import PASS, Fault, patched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ...batch import BatchLayout
    from ...cache import CacheView

_RESERVED = 2 * PASS
_LATENT_GROUP = 128


def _other_encoding() -> AbstractContextManager[None]:
    """Calls of more than a tile of rows write the fp8 encoding of another device."""
    right = write.Write.index
    other = {"fp8": "fp8fnuz", "fp8fnuz": "fp8"}

    def mistaken(kernel: write.Write, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        if slots.numel() > write._ROWS and view.format.name == "index_fp8":  # noqa: SLF001
            view = replace(view, format=index_fp8(view.format.width, encoding=other[view.format.encoding]))
        right(kernel, index_k, view, slots)

    return patched(write.Write, "index", mistaken)


def _saturating_rope() -> AbstractContextManager[None]:
    """Calls of more than a tile of rows clamp the rope part to what the last latent group's fp8 scale can hold."""
    right = write.Write.latent

    def clamped(
        kernel: write.Write, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor
    ) -> None:
        if slots.numel() > write._ROWS and view.format.rule is not None:  # noqa: SLF001
            most = kv_c[:, -_LATENT_GROUP:].abs().amax(1, keepdim=True)
            k_pe = torch.minimum(torch.maximum(k_pe, -most), most)
        right(kernel, kv_c, k_pe, view, slots)

    return patched(write.Write, "latent", clamped)


@contextmanager
def _thirty_two_bit_addresses() -> Iterator[None]:
    """Slot × stride wraps at 2 GiB. (Really reading in front of the cache would end the process.)"""

    def wrapped(view: CacheView, name: str, slots: torch.Tensor, *rest: Any) -> None:
        reached = slots // view.block_size * view.block_stride_bytes % 2**31
        gather(view, name, reached // view.block_stride_bytes * view.block_size + slots % view.block_size, *rest)

    with patched(select, "gather", wrapped), patched(attend, "gather", wrapped):
        yield


@contextmanager
def _scratch_over_cache() -> Iterator[None]:
    """Scratch was reserved for short requests; of a longer one, the key scales are gathered into the cache behind it."""
    readable, views = SparseMLA._readable, Workspace.views  # noqa: SLF001
    call: list[tuple[BatchLayout, CacheView]] = []

    def noted(operator: SparseMLA, batch: BatchLayout, view: CacheView) -> None:
        call[:] = [(batch, view)]
        readable(operator, batch, view)

    def beyond(workspace: Workspace, specs: Any) -> dict[str, torch.Tensor]:
        buffers = views(workspace, specs)
        if call and "scale" in buffers and call[0][0].max_seq_len > _RESERVED:
            cache, scale = call[0][1].storage.untyped_storage(), buffers["scale"]
            if cache.nbytes() >= scale.nbytes:
                overlaid = torch.empty(0, dtype=scale.dtype, device=scale.device)
                buffers["scale"] = overlaid.set_(cache, 0, scale.shape, scale.stride())
        return buffers

    with patched(SparseMLA, "_readable", noted), patched(Workspace, "views", beyond):
        yield


CACHES = (
    Fault(
        name="scratch-aliasing-the-cache",
        what="scratch that nothing reserved lies over the cache",
        stage="write",
        nets=("plans", "reference", "strays"),
        inject=_scratch_over_cache,
    ),
    Fault(
        name="wrong-fp8-encoding",
        what="e4m3fnuz bytes where the cache holds e4m3fn",
        stage="write",
        nets=("plans", "reference"),
        inject=_other_encoding,
    ),
    Fault(
        name="saturating-rope-part",
        what="the bf16 rope part of an fp8 row is clamped as if it were fp8",
        stage="write",
        nets=("plans", "reference"),
        inject=_saturating_rope,
    ),
    Fault(
        name="32-bit-address-overflow",
        what="slot × stride wraps at 2 GiB",
        stage="select",
        nets=("plans", "reference", "count", "nan"),
        inject=_thirty_two_bit_addresses,
    ),
)
