"""What the reader of engine source computes with: plain values, and stand-ins for what is not known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Mapping

_MAX_RUNS = 64


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that the source alone does not give; ``text`` says what it depends on."""

    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dotted name outside the source, such as ``torch.bfloat16``."""

    path: str


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the source tree: the file it stands in and its name."""

    path: str
    name: str


@dataclass(frozen=True, slots=True)
class Method:
    """A function of the source tree, bound to the class it was looked up on (None for a plain function)."""

    path: str
    node: ast.FunctionDef
    owner: Class | None


@dataclass(frozen=True, slots=True)
class Record:
    """An object whose fields are known by name: a capability, a page size, the engine's config."""

    kind: str
    fields: Mapping[str, Any]


class Unreadable(Exception):  # noqa: N818  # not an error of the program: the source goes beyond what is read
    """The source uses something that this reader does not follow."""


class Raised(Exception):  # noqa: N818  # the engine's own raise, met while its code was read
    """The source raised; ``text`` is its message."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)


@dataclass(slots=True)
class Choices:
    """Which way undecided conditions go in one run."""

    script: tuple[bool, ...]
    taken: list[tuple[str, bool]] = field(default_factory=list)

    def decide(self, text: str) -> bool:
        """Which way the condition ``text`` goes: always the same one within a run."""
        for known, way in self.taken:
            if known == text:
                return way
        place = len(self.taken)
        way = self.script[place] if place < len(self.script) else True
        self.taken.append((text, way))
        return way


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One way through the code: what was assumed of the undecided conditions, and what came out."""

    assumed: tuple[tuple[str, bool], ...]
    result: Any


def explore(run: Callable[[Choices], Any]) -> list[Outcome]:
    """Every outcome of ``run``, over both ways of each undecided condition (at most 64 runs)."""
    outcomes: list[Outcome] = []
    pending: list[tuple[bool, ...]] = [()]
    while pending and len(outcomes) < _MAX_RUNS:
        script = pending.pop()
        choices = Choices(script)
        result = run(choices)
        outcomes.append(Outcome(assumed=tuple(choices.taken), result=result))
        ways = tuple(way for _, way in choices.taken)
        pending += [(*ways[:place], not ways[place]) for place in range(len(script), len(ways))]
    return outcomes
