"""Files, functions and folders stay small enough to read; what must not be in code is not there."""

from __future__ import annotations

import ast
from dataclasses import is_dataclass
from inspect import Parameter, signature
from pathlib import Path

import sparse_mla

PACKAGE = Path(sparse_mla.__file__).parent
ROOT = PACKAGE.parent.parent
FILES = {
    str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
FILE_LINES, KERNEL_LINES, FUNCTION_LINES, JIT_LINES, DEPTH = 400, 450, 60, 120, 2
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve"}
VAGUE = ("manager", "helper", "utils", "common")


def lines(path):
    return len(path.read_text().splitlines())


def nodes(kind):
    return [(name, node) for name, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, kind)]


def limit(function):
    jit = any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)
    return JIT_LINES if jit else FUNCTION_LINES


def test_every_file_fits():
    most = {name: KERNEL_LINES if "triton" in name else FILE_LINES for name in FILES}
    assert {name: lines(path) for name, path in FILES.items() if lines(path) > most[name]} == {}


def test_every_function_fits():
    sizes = [
        (f"{name}:{function.name}", function.end_lineno - function.lineno + 1, limit(function))
        for name, function in nodes(ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [f"{name}: {size} lines, at most {most}" for name, size, most in sizes if size > most] == []


def test_no_folder_is_deeper_than_two():
    assert [name for name in FILES if len(Path(name).parts) - 1 > DEPTH] == []


def test_no_error_is_hidden():
    assert [f"{name}:{node.lineno}" for name, node in nodes(ast.ExceptHandler) if node.type is None] == []


def test_nothing_runs_foreign_code():
    calls = nodes(ast.Call)
    named = [(name, node) for name, node in calls if isinstance(node.func, ast.Name)]
    assert [f"{name}:{node.lineno}" for name, node in named if node.func.id in FORBIDDEN_CALLS] == []
    shells = [(name, word.value) for name, node in calls for word in node.keywords if word.arg == "shell"]
    assert [name for name, value in shells if not (isinstance(value, ast.Constant) and value.value is False)] == []
    imports = [(name, alias.name) for name, node in nodes(ast.Import) for alias in node.names]
    imports += [(name, node.module or "") for name, node in nodes(ast.ImportFrom)]
    assert [pair for pair in imports if pair[1].split(".")[0] in FORBIDDEN_MODULES] == []


def test_every_file_says_what_it_is_for():
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


def test_no_name_says_nothing():
    classes = [node.name for _, node in nodes(ast.ClassDef)]
    stems = [Path(name).stem for name in FILES]
    assert [name for name in classes + stems if any(word in name.lower() for word in VAGUE)] == []


def test_core_types_are_frozen_keyword_only_and_slotted():
    from sparse_mla import BatchLayout, CacheFormat, CacheView, Device, MLADims, Plan, Problem

    for kind in (BatchLayout, CacheFormat, CacheView, Device, MLADims, Plan, Problem):
        assert is_dataclass(kind)
        assert kind.__dataclass_params__.frozen, kind
        assert "__slots__" in vars(kind), kind
        kinds = {parameter.kind for parameter in signature(kind).parameters.values()}
        assert kinds == {Parameter.KEYWORD_ONLY}, kind


def test_the_sizes_are_told():
    """The ratio of tests to code, and the largest file: printed with -s, for the release's notes."""
    suite = sum(lines(path) for name, path in FILES.items() if name.startswith("testing"))
    code = sum(map(lines, FILES.values())) - suite
    tests = sum(lines(path) for path in (ROOT / "tests").rglob("*.py"))
    largest = max(FILES, key=lambda name: lines(FILES[name]))
    print(
        f"code {code} lines, shipped suite {suite}, tests {tests}: (suite + tests) / code = {(suite + tests) / code:.2f}"
    )
    print(f"largest file {largest}: {lines(FILES[largest])} lines")
    assert (suite + tests) / code > 0.5
