"""What a seam demands of the engine's source, and the static check of it. Reads syntax trees; imports no engine."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

P = ParamSpec("P")
R = TypeVar("R")

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A definition that must exist.

    Attributes:
        file: path below the engine's package, e.g. ``platforms/cpu.py``.
        name: qualified name of a class, function or method; "" for the whole module.
        accepts: parameters that it must take (``**kwargs`` counts).
        mentions: expressions that must occur in it, written as Python writes them, e.g. ``self.impl.forward_mqa``.
    """

    file: str
    name: str = ""
    accepts: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Seam:
    """One place where the integration touches the engine.

    Attributes:
        checked: engine versions whose source was read and run with it.
        ends: the event after which it is no longer needed.
    """

    name: str
    checked: tuple[str, ...]
    ends: str
    demands: tuple[Demand, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """A demand that the installed source does not meet."""

    seam: str
    where: str
    needs: str

    def __str__(self) -> str:
        return f"{self.where} needs {self.needs} (seam {self.seam})"


SEAMS: dict[str, Seam] = {}
"""Seams by the names of their functions; filled by the ``seam`` decorator as the files are imported."""


def seam(
    *, checked: tuple[str, ...], ends: str, demands: tuple[Demand, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the one place that touches a part of the engine."""

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__
        SEAMS[name] = Seam(name=name, checked=checked, ends=ends, demands=demands)
        return function

    return register


def all_seams() -> tuple[Seam, ...]:
    """The seams of this package."""
    for module in ("seams", "layer_seams"):
        import_module(f".{module}", __package__)
    return tuple(SEAMS.values())


def mismatches(root: Path, seams: Iterable[Seam] | None = None) -> list[Mismatch]:
    """All demands that the engine source below ``root`` (the package's folder) does not meet; empty when all fit."""
    found = []
    for item in all_seams() if seams is None else seams:
        for demand in item.demands:
            where = f"{demand.file}:{demand.name or '<module>'}"
            found += [Mismatch(seam=item.name, where=where, needs=needs) for needs in _unmet(root, demand)]
    return found


def _unmet(root: Path, demand: Demand) -> list[str]:
    file = root / demand.file
    if not file.is_file():
        return ["the file"]
    node = _find(_tree(file, file.stat().st_mtime_ns), demand.name)
    if node is None:
        return ["the definition"]
    missing = [f"parameter {name}" for name in demand.accepts if not _accepts(node, name)]
    texts = _expressions(node)
    return missing + [f"a use of {text}" for text in demand.mentions if text not in texts]


@lru_cache(maxsize=32)
def _tree(file: Path, _stamp: int) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _find(tree: ast.Module, name: str) -> ast.Module | _Definition | None:
    node: ast.Module | _Definition = tree
    for part in filter(None, name.split(".")):
        inner = [item for item in ast.walk(node) if isinstance(item, _Definition) and item.name == part]
        if not inner:
            return None
        node = inner[0]
    return node


def _accepts(node: ast.Module | _Definition, name: str) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    given = node.args
    return given.kwarg is not None or name in {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _expressions(node: ast.AST) -> set[str]:
    """Every name and attribute in the definition as text, every keyword as ``name=``, and definitions and imports."""
    texts: set[str] = set()
    for item in ast.walk(node):
        if isinstance(item, (ast.Attribute, ast.Name)):
            texts.add(ast.unparse(item))
        elif isinstance(item, ast.keyword):
            texts.add(f"{item.arg}=")
        elif isinstance(item, _Definition):
            texts.add(item.name)
        elif isinstance(item, ast.ImportFrom):
            texts.add(f"from {item.module}")
    return texts
