"""The one place where kernels start, so that the compile matrix can see what would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from collections.abc import Callable

INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, which knows no assembly."""


def _start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    kernel[grid](*args, **options)


start: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None] = _start


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Start ``kernel`` on ``grid``; ``options`` are its compile-time values, ``num_warps`` and ``num_stages``."""
    if all(grid):
        start(kernel, grid, args, options)
