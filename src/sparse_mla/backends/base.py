"""What a backend provides: a table row (torch-free) and a kernel class for each stage that it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ..batch import BatchLayout
    from ..cache import CacheView
    from ..device import Device
    from ..problem import Problem, Stage
    from ..requirements import Requires
    from ..workspace import BufferSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        path: ``module:Class`` of the kernel, imported when it is bound and not before.
        scratch: the buffers it needs for (problem, device, byte budget), without importing torch.
        mode: ``strict`` or ``fast``, for (problem, device): see the contract's C1.
        proved_on: device kinds where an end-to-end run is on record; elsewhere an engine must ask by name.
    """

    stage: Stage
    name: str
    path: str
    requires: Requires
    scratch: Callable[[Problem, Device, int], tuple[BufferSpec, ...]]
    mode: Callable[[Problem, Device], str]
    proved_on: tuple[str, ...] = ()


class WriteKernel(Protocol):
    """Writes rows into caches; a negative slot writes nothing."""

    def __init__(self, problem: Problem, device: Device) -> None: ...

    def warm_up(self, where: torch.device) -> None:
        """Compile everything that a later call could need."""

    def latent(self, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None: ...

    def index(self, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None: ...


class SelectKernel(Protocol):
    """Writes ``out [T, K] i32`` and ``lens [T] i32``; adds rows with keys but only NaN scores to ``flags[0]``."""

    def __init__(self, problem: Problem, device: Device) -> None: ...

    def warm_up(self, where: torch.device) -> None: ...

    def __call__(
        self,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        view: CacheView,
        batch: BatchLayout,
        out: torch.Tensor,
        lens: torch.Tensor,
        flags: torch.Tensor,
        scratch: Mapping[str, torch.Tensor],
    ) -> None: ...


class AttendKernel(Protocol):
    """Writes ``out [T, H, D_c]`` and, unless it is None, ``lse [T, H] f32``."""

    def __init__(self, problem: Problem, device: Device) -> None: ...

    def warm_up(self, where: torch.device) -> None: ...

    def __call__(
        self,
        q: torch.Tensor,
        view: CacheView,
        indices: torch.Tensor,
        batch: BatchLayout,
        softmax_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scratch: Mapping[str, torch.Tensor],
    ) -> None: ...
