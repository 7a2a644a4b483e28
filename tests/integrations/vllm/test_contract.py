"""Every seam fits the installed vLLM's source, and a vLLM that changed under a seam is seen. Imports no engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from sparse_mla.integrations.vllm import contract

PACKAGE = Path(contract.__file__).parent
SEAM_FILES = {"seams.py", "layer_seams.py"}
ALL = sorted(seam.name for seam in contract.all_seams())
WITH_DEMANDS = [name for name in ALL if contract.SEAMS[name].demands]


@pytest.mark.parametrize("name", ALL)
def test_seam_fits_the_installed_source(name, vllm_root):
    assert contract.mismatches(vllm_root, [contract.SEAMS[name]]) == []


def test_every_function_that_imports_vllm_is_a_seam():
    importing = set()
    for file in SEAM_FILES:
        tree = ast.parse((PACKAGE / file).read_text())
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and _vllm_imports(function):
                importing.add(function.name)
    assert importing
    assert importing <= set(ALL)


def test_nothing_else_imports_vllm():
    strangers = {
        file.name: names
        for file in PACKAGE.glob("*.py")
        if file.name not in SEAM_FILES and (names := _vllm_imports(ast.parse(file.read_text())))
    }
    assert strangers == {}


def _vllm_imports(tree: ast.AST) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return [name for name in names if name.split(".")[0] == "vllm"]


@pytest.mark.parametrize("name", ALL)
def test_seam_says_what_it_was_checked_with_and_what_ends_it(name):
    seam = contract.SEAMS[name]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in seam.checked)
    assert seam.ends


@pytest.mark.parametrize("name", WITH_DEMANDS)
def test_a_definition_that_went_away_is_named(name, tmp_path):
    seam = contract.SEAMS[name]
    for demand in seam.demands:
        (tmp_path / demand.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / demand.file).write_text("something_else = 1\n")
    found = contract.mismatches(tmp_path, [seam])
    assert {item.seam for item in found} == {name}
    assert len(found) >= len({demand.file for demand in seam.demands})


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("", "the definition"),
        ("class Layer:\n    def run(self, q):\n        return self.impl.go(q)\n", "parameter cache"),
        ("class Layer:\n    def run(self, q, cache):\n        return self.other.go(q)\n", "a use of self.impl.go"),
    ],
)
def test_what_is_missing_is_said(source, missing, tmp_path):
    demand = contract.Demand(file="layer.py", name="Layer.run", accepts=("q", "cache"), mentions=("self.impl.go",))
    seam = contract.Seam(name="here", checked=("1.0.0",), ends="never", demands=(demand,))
    (tmp_path / "layer.py").write_text(source)
    assert [item.needs for item in contract.mismatches(tmp_path, [seam])] == [missing]


def test_a_definition_that_fits_passes(tmp_path):
    demand = contract.Demand(file="layer.py", name="Layer.run", accepts=("q", "cache"), mentions=("self.impl.go",))
    seam = contract.Seam(name="here", checked=("1.0.0",), ends="never", demands=(demand,))
    (tmp_path / "layer.py").write_text("class Layer:\n    def run(self, q, **more):\n        return self.impl.go(q)\n")
    assert contract.mismatches(tmp_path, [seam]) == []


def test_a_missing_file_is_said(tmp_path):
    found = contract.mismatches(tmp_path, [contract.SEAMS["step_of"]])
    assert [item.needs for item in found] == ["the file"]
