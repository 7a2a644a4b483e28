"""Scratch: promised by byte before it is used, one arena for each device and stream lane."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .cache import ITEM_BYTES
from .errors import WorkspaceError
from .shapes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

ALIGN = 256
"""Bytes: every buffer starts at a multiple of it, so that vector loads and BLAS paths do not depend on luck."""
_ITEM_BYTES = {**ITEM_BYTES, "i32": 4, "i64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSpec:
    """A named scratch buffer of a stage."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def packed_bytes(specs: Iterable[BufferSpec]) -> int:
    """Bytes of one stage's buffers laid one after the other, each aligned."""
    return sum(-(-spec.nbytes // ALIGN) * ALIGN for spec in specs)


class Workspace:
    """One arena of bytes. Layers on a stream lane share it; nothing in it lives from one call to the next.

    ``reserve`` grows it until ``lock``; later growth is refused, so the peak that a profiling run sees is the peak.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._arena: torch.Tensor | None = None
        self._locked = False

    @property
    def nbytes(self) -> int:
        """Bytes that were reserved."""
        return 0 if self._arena is None else self._arena.numel() - ALIGN

    def reserve(self, nbytes: int) -> None:
        """Make the arena at least ``nbytes`` large.

        Raises:
            WorkspaceError: the arena is locked and too small.
        """
        import torch

        if nbytes <= self.nbytes and self._arena is not None:
            return
        if self._locked:
            raise WorkspaceError(
                "the workspace is locked", needs=f"{nbytes} bytes", got=self.nbytes, hint="Reserve before locking."
            )
        self._arena = None  # release before the larger allocation: the peak is one arena
        self._arena = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device=self._device)

    def lock(self) -> None:
        """Refuse later growth."""
        self._locked = True

    def views(self, specs: Iterable[BufferSpec]) -> dict[str, torch.Tensor]:
        """The buffers of one stage, from the arena's start; contents are whatever the last call left.

        Raises:
            WorkspaceError: the arena is smaller than the buffers.
        """
        import torch

        wanted = tuple(specs)
        if packed_bytes(wanted) > self.nbytes or self._arena is None:
            raise WorkspaceError("scratch was not reserved", needs=f"{packed_bytes(wanted)} bytes", got=self.nbytes)
        start, views = -self._arena.data_ptr() % ALIGN, {}
        for spec in wanted:
            flat = self._arena[start : start + spec.nbytes].view(getattr(torch, DTYPE_NAMES[spec.dtype]))
            views[spec.name] = flat.view(spec.shape)
            start += -(-spec.nbytes // ALIGN) * ALIGN
        return views

    def fill(self, byte: int) -> None:
        """Overwrite all scratch with one byte value: tests poison it, since nothing may depend on its contents."""
        if self._arena is not None:
            self._arena.fill_(byte)
