"""What a fault is, and how one is put in at the place where it would arise."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...backends.eager.scratch import MAX_SELECT_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PASS = MAX_SELECT_ROWS
"""Rows that select computes in one pass: calls of at most so many take the short way, which each fault leaves intact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A kind of fault. Nothing is wrong with a prompt that fits into one pass.

    Attributes:
        stage: the verb in whose results it shows first.
        nets: the comparisons of ``verify`` that see it, as the last part of their ids; without these it escapes.
        inject: a context in which the code has the fault. Not for threads; contexts may nest.
        level: ``operator``, or ``engine`` where only the calls of an engine have room for it.
    """

    name: str
    what: str
    stage: str
    nets: tuple[str, ...]
    inject: Callable[[], AbstractContextManager[None]]
    level: str = "operator"


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Let ``owner.name`` be ``replacement`` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
