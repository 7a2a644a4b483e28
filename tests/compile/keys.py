"""What Triton would compile: the key of each launch on an architecture that is not here, by Triton's own rules.

A launch compiles when its key is new: argument types, what Triton specialises on (whole numbers that are 1 or multiples of
16, pointers on 16-byte boundaries, on AMD allocations below 2 GiB), compile-time values and options.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cross import target_of
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from sparse_mla.backends.triton import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparse_mla.device import Device

Key = tuple[str, tuple[Any, ...], tuple[Any, ...]]


def keys_of(call: Callable[[], object], device: Device) -> set[Key]:
    """The keys of the launches that ``call`` would make on ``device``, without making them."""
    found: set[Key] = set()

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        del grid
        _, specialised, rest = _binder(kernel, device)(*launch.arguments(args, device.kind == "rocm"), **options)
        found.add((kernel.fn.__name__, tuple(specialised), tuple(sorted(rest.items()))))

    started, launch.start = launch.start, note
    try:
        call()
    finally:
        launch.start = started
    return found


@lru_cache(maxsize=256)
def _binder(kernel: Any, device: Device) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(target_of(device)))


def described(missed: set[Key], known: set[Key]) -> str:
    """Each missed key beside the nearest known one of its kernel: where they differ."""
    lines = []
    for name, specialised, rest in missed:
        like = [key for key in known if key[0] == name]
        nearest = min(like, key=lambda key: sum(a != b for a, b in zip(key[1], specialised, strict=True)), default=None)
        if nearest is None:
            lines.append(f"{name}: never started by warm-up")
            continue
        changes = [
            f"argument {i}: {b}, warm-up {a}"
            for i, (a, b) in enumerate(zip(nearest[1], specialised, strict=True))
            if a != b
        ]
        lines.append(f"{name}: {changes} {rest if rest != nearest[2] else ''}")
    return "\n".join(lines)
