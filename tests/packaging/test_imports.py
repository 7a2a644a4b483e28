"""What an import loads, each asked in a fresh process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import sparse_mla

PACKAGE = Path(sparse_mla.__file__).parent
HEAVY = ("torch", "triton", "vllm", "transformers", "numpy", "safetensors", "matplotlib", "hypothesis")
NAMES = [
    "AttentionOutput",
    "BatchLayout",
    "CacheFormat",
    "CacheView",
    "Device",
    "MLADims",
    "Plan",
    "Problem",
    "SparseMLA",
    "SparseMLAError",
    "Workspace",
    "make_plan",
    "probe",
    "resolve",
]
TORCH_FREE = (
    "sparse_mla",
    "sparse_mla.errors",
    "sparse_mla.envs",
    "sparse_mla.shapes",
    "sparse_mla.dims",
    "sparse_mla.cache",
    "sparse_mla.batch",
    "sparse_mla.device",
    "sparse_mla.problem",
    "sparse_mla.requirements",
    "sparse_mla.workspace",
    "sparse_mla.backends.base",
    "sparse_mla.backends.table",
    "sparse_mla.resolve",
    "sparse_mla.plan",
    "sparse_mla.testing",
    "sparse_mla.testing.geometries",
    "sparse_mla.testing.plugin",
    "sparse_mla.cli",
    "sparse_mla.cli.main",
)
BLOCK = "import sys\nsys.modules.update(dict.fromkeys({names}))\n"
"""Python's own way to say that a module is not there: imports raise, and find_spec finds nothing."""


def fresh(code, *, blocked=()):
    """Run code in a new interpreter and return the JSON that it prints."""
    start = BLOCK.format(names=list(blocked)) if blocked else ""
    ran = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def loaded_by(code, *, blocked=()):
    return fresh(f"import json, sys\n{code}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))")


def test_the_public_names():
    assert sorted(sparse_mla.__all__) == sorted(NAMES)
    assert len(NAMES) <= 14


def test_every_public_name_is_there_and_documented():
    for name in NAMES:
        assert getattr(sparse_mla, name).__doc__, name


def test_any_other_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sparse_mla.nothing
    assert not hasattr(sparse_mla, "torch")


def test_importing_the_package_loads_nothing_else():
    before = set(loaded_by(""))
    after = set(loaded_by("import sparse_mla"))
    assert after - before - sys.stdlib_module_names == {"sparse_mla"}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_decisions_need_neither_torch_nor_anything_optional(module):
    assert not set(HEAVY) & set(loaded_by(f"import {module}"))
    fresh(f"import {module}; print('null')", blocked=HEAVY)


def test_a_plan_is_made_where_torch_cannot_be_imported():
    said = fresh(
        "import json\n"
        "from sparse_mla.testing.geometries import GLM_TP4_FP8\n"
        "from sparse_mla import Device, make_plan\n"
        "problem = GLM_TP4_FP8.problem(max_num_tokens=8192, max_num_requests=64, max_model_len=202752)\n"
        "plan = make_plan(problem, Device.named('gfx950'), backend='auto', assume_installed=True)\n"
        "print(json.dumps(plan.describe()))",
        blocked=HEAVY,
    )
    assert said["device"] == "gfx950"
    assert set(said["stages"]) == {"write", "select", "attend"}
    assert said["scratch_bytes"] > 0


def test_a_refusal_is_told_where_torch_cannot_be_imported():
    said = fresh(
        "import json\n"
        "from sparse_mla.errors import UsageError\n"
        "from sparse_mla.testing.geometries import PLAIN\n"
        "from sparse_mla import Device, make_plan\n"
        "try:\n"
        "    make_plan(PLAIN.problem(max_num_tokens=1, max_num_requests=1, max_model_len=1), Device.named('cpu'), backend='x')\n"
        "except UsageError as error:\n"
        "    print(json.dumps(str(error)))",
        blocked=HEAVY,
    )
    assert "unknown backend for stage write" in said


def test_the_operators_load_torch_and_nothing_else_that_is_optional():
    loaded = set(
        loaded_by("import sparse_mla.attention, sparse_mla.backends.eager.select, sparse_mla.backends.eager.attend")
    )
    assert "torch" in loaded
    assert not {"triton", "vllm", "transformers", "hypothesis", "pytest"} & (loaded - set(loaded_by("import torch")))


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in path.parts]


def imported(path):
    """Top-level names of what a file imports outright; names under TYPE_CHECKING do not count."""
    tree, hidden = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            hidden |= {id(inner) for inner in ast.walk(node)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("triton", ("backends/triton/",)),
        ("vllm", ("integrations/vllm/", "verify/", "testing/retrieval.py")),
        ("transformers", ("integrations/transformers.py", "verify/", "testing/tiny_model.py", "testing/retrieval.py")),
        ("hypothesis", ("testing/conformance/",)),
        ("pytest", ("testing/conformance/", "testing/plugin.py")),
        ("matplotlib", ("bench/",)),
    ],
)
def test_only_the_folder_of_a_package_imports_it(package, allowed):
    importing = [str(path.relative_to(PACKAGE)) for path in modules() if package in imported(path)]
    assert [path for path in importing if not path.startswith(allowed)] == []
