"""The one place where kernels start, so that the compile matrix can see what would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from ...errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...device import Device

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no assembly."""


_FAILED = "PassManager::run failed"
_ROCM = torch.version.hip is not None


def arguments(args: tuple[Any, ...], rocm: bool) -> tuple[Any, ...]:
    """What a kernel is started with. On AMD Triton compiles a second kernel, with 32-bit offsets, for tensors whose allocation
    is below 2 GiB; how large an engine's allocations are is nothing that warm-up could know, so it is not told.
    """
    if not rocm:
        return args
    return tuple(triton.reinterpret(arg, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        kernel[grid](*arguments(args, _ROCM), **options)
    except (triton.TritonError, RuntimeError) as error:
        if isinstance(error, triton.TritonError) or _FAILED in str(error):
            raise KernelError(kernel.fn.__name__, needs="to compile", got=_last(error)) from error
        raise


def _last(error: Exception) -> str:
    """The end of a compiler's message, on one line: what went wrong stands there."""
    return " ".join(str(error).split())[-200:]


start: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] = _start


@triton.jit
def follow(EARLY: tl.constexpr):
    """First in a kernel that may start early: wait for the one before it, then let the one behind it start early."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def nothing():
    """An empty tuple to add to: Triton does not unpack one into another, and mypy would type a literal as empty for good."""
    return ()


def early(device: Device) -> dict[str, bool]:
    """Options with which a kernel starts while the one before it ends, where the device can (sm90 and later).

    The kernel must begin with ``follow``: until then nothing that an earlier kernel wrote may be read, or read by it written.
    """
    can = device.kind == "cuda" and int(device.arch.removeprefix("sm")) >= 90 and not INTERPRETED
    return {"EARLY": can} | ({"launch_pdl": True} if can else {})


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on ``grid``; ``options`` are its compile-time values and Triton's own."""
    if all(grid):
        start(kernel, grid, args, options)
