"""The wheel that users get, built and used away from the sources."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sparse_mla

ROOT = Path(sparse_mla.__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel, ending):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(ending)]
        return archive.read(name).decode()


def test_it_is_pure_python_for_any_platform(wheel):
    assert wheel.name == f"sparse_mla-{sparse_mla.__version__}-py3-none-any.whl"


def test_it_holds_the_package_its_data_and_nothing_else(wheel):
    held = set(names(wheel))
    package = Path(sparse_mla.__file__).parent
    wanted = {
        f"sparse_mla/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert "sparse_mla/py.typed" in held
    assert any(name.startswith("sparse_mla/doctor/defects/") and name.endswith(".toml") for name in held)
    rest = {name for name in held - wanted if ".dist-info/" not in name}
    assert rest == set()
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_it_demands_nothing_heavy(wheel):
    lines = read(wheel, ".dist-info/METADATA").splitlines()
    demanded = [line.split(": ")[1] for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    bare = {line.split(";")[0].split(">")[0].split("<")[0].split("=")[0].strip() for line in demanded}
    assert bare == {"packaging", "rich", "tomli"}
    extras = {line.split(": ")[1] for line in lines if line.startswith("Provides-Extra")}
    assert extras >= {"torch", "vllm", "transformers", "bench", "test"}


def test_its_entry_points(wheel):
    said = read(wheel, ".dist-info/entry_points.txt")
    assert "sparse-mla = sparse_mla.cli.main:main" in said
    assert "[vllm.general_plugins]" in said
    assert "sparse_mla = sparse_mla.testing.plugin" in said


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked into a folder of its own, as an installer would."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed, code, *, site=True):
    command = [
        sys.executable,
        *([] if site else ["-S"]),
        "-c",
        f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}",
    ]
    return subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=120, check=False)


def test_it_imports_from_where_it_was_installed(installed):
    ran = run(installed, "import sparse_mla; print(sparse_mla.__file__, sparse_mla.__version__)")
    assert ran.stdout.split() == [str(installed / "sparse_mla" / "__init__.py"), sparse_mla.__version__], ran.stderr


def test_plan_runs_on_the_standard_library_alone(installed):
    """Without site-packages: a broken environment can still be asked about another machine."""
    code = (
        "from sparse_mla import Device, make_plan\n"
        "from sparse_mla.testing.geometries import GLM_TP4\n"
        "problem = GLM_TP4.problem(max_num_tokens=8192, max_num_requests=64, max_model_len=65536)\n"
        "print(make_plan(problem, Device.named('sm90'), backend='eager').scratch_bytes)\n"
        "print(any(name.split('.')[0] == 'torch' for name in sys.modules))"
    )
    ran = run(installed, code, site=False)
    assert ran.returncode == 0, ran.stderr
    scratch, torch_loaded = ran.stdout.split()
    assert int(scratch) > 0
    assert torch_loaded == "False"


@pytest.mark.parametrize(("asked", "offered"), [((), False), (("--pyargs", "sparse_mla.testing"), True)])
def test_only_a_run_that_names_the_suite_is_offered_its_options(tmp_path, asked, offered):
    command = [sys.executable, "-m", "pytest", "--help", *asked]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ("--fuzz-examples" in ran.stdout) is offered
