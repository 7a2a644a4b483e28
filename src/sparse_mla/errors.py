"""The exception tree. Every message says what, what it needs, what it got and what to do, on one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def _sentence(what: str, needs: object | None, got: object | None, hint: str | None) -> str:
    parts = [what]
    if needs is not None:
        parts.append(f": needs {needs}")
    if got is not None:
        parts.append(f"{',' if needs is not None else ':'} got {got}")
    if hint:
        parts.append(f". {hint}")
    return "".join(parts)


class SparseMLAError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the command line returns for it."""

    exit_code = 2

    def __init__(
        self, what: str, *, needs: object | None = None, got: object | None = None, hint: str | None = None
    ) -> None:
        self.what, self.needs, self.got, self.hint = what, needs, got, hint
        super().__init__(_sentence(what, needs, got, hint))


class UsageError(SparseMLAError, ValueError):
    """An argument, option or environment variable has a value that cannot be used."""


class ConfigError(UsageError):
    """A model config is missing, unreadable, not DSA, or contradicts itself."""


class ShapeError(UsageError):
    """A tensor does not have the shape, dtype or strides that its spec states."""


class CacheFormatError(UsageError):
    """A cache view and its format do not fit together."""


class WorkspaceError(SparseMLAError):
    """Scratch was asked for that the plan did not promise."""


class BackendRejectedError(SparseMLAError):
    """No backend, or not the one asked for, can run a stage; ``reasons`` holds every reason."""

    def __init__(self, headline: str, reasons: Iterable[object], hint: str) -> None:
        self.reasons = tuple(reasons)
        self.headline = headline
        lines = "".join(f"\n  {reason}" for reason in self.reasons)
        super().__init__(f"{headline}:{lines}\n  {hint}" if self.reasons else f"{headline}. {hint}")


class KernelError(SparseMLAError):
    """A kernel cannot serve on this device: it does not compile; ``got`` is the compiler's own words."""


class StrictModeError(KernelError):
    """The kernels of a stage give other bits in decode than in prefill on this device."""


class NotCheckableError(SparseMLAError):
    """Nothing was proved either way: an engine is missing, memory is too small, an endpoint is down."""

    exit_code = 3
