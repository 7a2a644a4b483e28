"""Mutants of the core, of ``eager``, of the vLLM integration, of doctor and of the endpoint checks: small automatic changes
of their source, each of which a check of the gate must notice. Prints one JSON line a mutant; docs/self-test.md has what
came of them.

A general mutation tester would start a new interpreter and load torch for every mutant. Here a mutant is a fork of a
process that has torch loaded and none of our code: an import hook hands it one changed module, and the cheapest checks
that can see a fault run first. A time limit counts as noticed.

    python scripts/mutants.py --count 230 --out mutants.jsonl
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "sparse_mla"
EAGER = "backends.eager.attend", "backends.eager.gather", "backends.eager.scratch", "backends.eager.select"
VLLM = "impl", "indexer", "metadata", "layer_seams", "runtime", "layout", "selection", "engine_plan"
CORE = "attention", "batch", "cache", "device", "dims", "footprint", "plan", "problem", "quantize", "requirements"
DOCTOR = (
    *("advice", "candidates", "evaluation", "expressions", "facts", "findings", "flags", "gpus", "logs"),
    *("log_facts", "longprefill", "selector", "signatures", "values"),
)
ENDPOINT = "compare", "localise", "outcome", "prompts", "session", "sweep", "verdicts"
TARGETS = {
    "core": (*CORE, "resolve", "shapes", "workspace"),
    "eager": (*EAGER, "backends.eager.write"),
    "vllm": tuple(f"integrations.vllm.{name}" for name in VLLM),
    "doctor": tuple(f"doctor.{name}" for name in DOCTOR),
    "endpoint": tuple(f"verify.endpoint.{name}" for name in ENDPOINT),
}
DOCTOR_TESTS = (
    *("findings", "expressions", "gpus", "logs", "longprefill", "signatures", "selector", "candidates", "messages"),
    *("log_facts", "excerpts", "audit", "hostile", "knowledge", "cli"),
)
UNIT = {
    "core": ("tests/unit", "tests/footprint", "tests/golden", "tests/cli"),
    "eager": ("tests/golden", "tests/unit/test_attention.py"),
    "vllm": tuple(
        f"tests/integrations/vllm/test_{name}.py" for name in ("layer", "layout", "runtime", "selection", "trace")
    ),
    "doctor": tuple(f"tests/doctor/test_doctor_{name}.py" for name in DOCTOR_TESTS),
    "endpoint": tuple(f"tests/endpoint/test_{name}.py" for name in ("verdicts", "prompts", "run")),
}
SLOW = ("C4-sized", "C4-model", "C7-envelope", "C11-reference", "C1-chunks")
ORDER = ("C3", "C11", "C5", "C9", "C2", "C1", "C4", "C6", "C8", "C10", "C7")
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip
NAMES = {
    "min": "max", "max": "min", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "maximum": "minimum",
    "zeros": "ones", "zero_": "abs_", "cumsum": "flip", "exp": "exp2", "log": "log2", "relu_": "abs_",
}  # fmt: skip
Change = tuple[str, ast.AST, str, object]
"""What is changed, in words, and the node, its field and the new value."""


def changes(tree: ast.Module) -> Iterator[Change]:
    """Every change that could be made, in the order of the source; type hints, decorators and docstrings are left out."""
    stack: list[ast.AST] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield from of_node(node)
        skipped = {"annotation", "returns", "decorator_list", "bases"}
        children = [child for name, child in ast.iter_fields(node) if name not in skipped]
        flat = [item for child in children for item in (child if isinstance(child, list) else [child])]
        stack += [item for item in reversed(flat) if isinstance(item, ast.AST)]


def of_node(node: ast.AST) -> Iterator[Change]:
    """The changes of one node."""
    text = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
    if isinstance(node, ast.Constant):
        yield from of_constant(node)
    elif isinstance(node, ast.Name | ast.Attribute):
        field = "id" if isinstance(node, ast.Name) else "attr"
        if getattr(node, field) in NAMES and isinstance(node.ctx, ast.Load):
            yield f"`{text}` -> {NAMES[getattr(node, field)]}", node, field, NAMES[getattr(node, field)]
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                yield f"slice `{text}` without its {bound} bound", node, bound, None
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[0], ast.Starred):
        yield f"arguments swapped: `{text}`", node, "args", [node.args[1], node.args[0], *node.args[2:]]
    else:
        yield from of_operators(node, text)
    if isinstance(node, ast.stmt):
        yield from of_statements(node)


def of_operators(node: ast.AST, text: str) -> Iterator[Change]:
    """Comparisons, operators and signs."""
    if isinstance(node, ast.Compare):
        for place, kind in enumerate(node.ops):
            swapped = [*node.ops[:place], SWAPS[type(kind)](), *node.ops[place + 1 :]]
            yield f"other comparison in `{text}`", node, "ops", swapped
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in SWAPS:
        yield f"other operator in `{text}`", node, "op", SWAPS[type(node.op)]()
    elif isinstance(node, ast.UnaryOp):
        yield f"`{text}` without its sign", node, "operand", ast.UnaryOp(node.op, node.operand)  # twice is not at all
    elif isinstance(node, ast.If | ast.IfExp):
        yield f"condition negated: `{ast.unparse(node.test)}`", node, "test", ast.UnaryOp(ast.Not(), node.test)


def of_statements(node: ast.stmt) -> Iterator[Change]:
    """Each statement inside one left out."""
    for field in ("body", "orelse"):
        for place, statement in enumerate(getattr(node, field, [])):
            if droppable(statement):
                rest = [*getattr(node, field)[:place], ast.Pass(), *getattr(node, field)[place + 1 :]]
                yield f"dropped: `{ast.unparse(statement)}`", node, field, rest


def of_constant(node: ast.Constant) -> Iterator[Change]:
    """Numbers one off or doubled, truth values flipped; text is left alone."""
    value = node.value
    if isinstance(value, bool):
        yield f"{value} -> {not value}", node, "value", not value
    elif isinstance(value, int):
        for other in (value + 1, value - 1):
            yield f"{value} -> {other}", node, "value", other
    elif isinstance(value, float):
        yield f"{value} -> {value * 2 + 1}", node, "value", value * 2 + 1


def droppable(statement: ast.stmt) -> bool:
    """Whether a statement acts without giving a name to anything: else its loss would be a NameError, which anyone sees."""
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return called or isinstance(statement, ast.AugAssign | ast.Continue | ast.Return | ast.Raise)


def mutated(module: str, number: int) -> tuple[ast.Module, str, int]:
    """The module's tree with its change ``number``, what that is, and its line."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    what, node, field, value = list(changes(tree))[number]
    line = getattr(node, "lineno", 0)
    if field in {"body", "orelse"} and isinstance(value, list):
        old = getattr(node, field)
        line = next(was.lineno for was, new in zip(old, value, strict=True) if was is not new)
    setattr(node, field, value)
    return ast.fix_missing_locations(tree), what, line


class Changed(importlib.machinery.SourceFileLoader):
    """Loads one module from a changed tree."""

    tree: ast.Module

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """The changed tree, compiled; no cached bytes are read or written."""
        del fullname
        return compile(self.tree, self.path, "exec")


class Finder:
    """Hands out the changed module, and leaves all others to Python."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        self.name, self.tree = f"sparse_mla.{module}", tree

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        """As Python's own finders are asked."""
        del path, target
        if fullname != self.name:
            return None
        loader = Changed(fullname, str(PACKAGE / f"{fullname.partition('.')[2].replace('.', '/')}.py"))
        loader.tree = self.tree
        return importlib.util.spec_from_loader(fullname, loader)


def noticed(target: str, where: int) -> None:
    """In the fork: run checks until one notices, and write which to the pipe."""
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    current = [""]
    options = ("-xq", "--assert=plain", "-p", "pytest_timeout", "-p", "no:cacheprovider")
    try:
        if target == "eager":
            conformance(current)
        for path in UNIT[target]:
            if pytest.main([*options, str(ROOT / path)]) != 0:
                os.write(where, f"{path}\n".encode())
                return
    except BaseException as error:  # noqa: BLE001 (whatever it is, the mutant was noticed)
        os.write(where, f"{current[0]}: {type(error).__name__}\n".encode())


def preload(module: str) -> None:
    """What no mutant of the module changes is loaded once, in the parent; the fork forgets what it may have changed."""
    for name in (
        "pytest",
        "pytest_timeout",
        "sparse_mla.testing.tiny_model",
        "sparse_mla.testing.conformance.parameters",
    ):
        importlib.import_module(name)
    changed = "sparse_mla"
    if module.startswith(("backends", "integrations")) and not module.endswith("scratch"):
        changed = f"sparse_mla.{module.partition('.')[0]}"  # all else is the same; the table of backends holds scratch's functions
    for name in [name for name in sys.modules if name.startswith(changed)]:
        del sys.modules[name]


def conformance(current: list[str]) -> None:
    """The cases of the conformance suite, the cheap ones first; ``current[0]`` names the one that runs."""
    from sparse_mla.errors import BackendRejectedError
    from sparse_mla.testing.candidates import from_table
    from sparse_mla.testing.conformance.parameters import CASES

    candidate = from_table("eager")
    cases = [case for case in CASES if case.tag == "ci"]
    for case in sorted(cases, key=lambda case: (str(case).startswith(SLOW), ORDER.index(case.clause))):
        with contextlib.suppress(BackendRejectedError):
            current[0] = str(case)
            case.run(candidate)


def judge(target: str, module: str, number: int, limit: float) -> dict[str, object]:
    """Fork, change, check: which check noticed, or ``survived``."""
    tree, what, line = mutated(module, number)
    began, (reading, writing) = time.monotonic(), os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(tempfile.gettempdir())  # a changed line may write anywhere
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        preload(module)
        sys.meta_path.insert(0, Finder(module, tree))  # type: ignore[arg-type]
        noticed(target, writing)
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], limit)
    by = os.read(reading, 4096).decode().strip() if ready else "time limit"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    seconds = round(time.monotonic() - began, 1)
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8").splitlines()[line - 1].strip()
    found = {"module": module, "line": line, "what": what, "source": source}
    return {**found, "by": by or "survived", "seconds": seconds}


def drawn(target: str, count: int, seed: int) -> list[tuple[str, str, int]]:
    """``(target, module, number of the change)`` of some mutants, in the order of the source."""
    every = []
    for module in TARGETS[target]:
        tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        every += [(target, module, number) for number, _ in enumerate(changes(tree))]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120, help="mutants of each target; drawn from the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=tuple(TARGETS), nargs="+", default=tuple(TARGETS))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one mutant")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    preload("nothing")
    wanted = [mutant for target in options.only for mutant in drawn(target, options.count, options.seed)]
    done = len(options.out.read_text(encoding="utf-8").splitlines()) if options.out.exists() else 0
    counts: Counter[str] = Counter()
    with options.out.open("a", encoding="utf-8") as out:
        for mutant in wanted[done:]:  # a run that was broken off goes on
            result = judge(*mutant, limit=options.limit)
            counts["survived" if result["by"] == "survived" else "noticed"] += 1
            out.write(json.dumps(result) + "\n")
            out.flush()
    print(dict(counts), file=sys.stderr)


if __name__ == "__main__":
    main()
