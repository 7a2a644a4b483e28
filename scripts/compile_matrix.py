"""Compile the worst configuration of every Triton kernel for every architecture and write the tables of what they take.

python scripts/compile_matrix.py                   measure with this interpreter's Triton, the oldest that is supported
python scripts/compile_matrix.py --python OTHER    and with the Triton of another interpreter; may be repeated
python scripts/compile_matrix.py --newest          and with the newest Triton that installs, in an environment of its own
python scripts/compile_matrix.py --check           fail if the kernels' sources are not those of the committed tables
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance" / "compile-matrix.md"
SOURCES = ROOT / "src" / "sparse_mla" / "backends" / "triton"
NEWEST = ROOT / "build" / "newest-triton"
ABSENT = "·"
INTRODUCTION = f"""\
# What the Triton kernels take, per architecture

Compiled, not run (but for sm90): 64 index heads, the worst configurations of each kernel, by Triton's own compiler targets,
at both ends of the range of Triton that is supported. Each cell: KiB of shared memory (LDS) of a program / registers of a
thread / bytes that spill; {ABSENT} where that architecture starts no such kernel. The last line is the architecture's limit of
shared memory in KiB; bold is above it, "fails" does not compile."""


def source_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCES.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", default=[], metavar="OTHER", help="an interpreter with another Triton"
    )
    parser.add_argument("--newest", action="store_true", help="make one with the newest Triton in build/newest-triton")
    parser.add_argument("--check", action="store_true", help="compile nothing; compare the sources' hash")
    parser.add_argument("--measure", action="store_true", help="print this interpreter's figures as JSON")
    args = parser.parse_args()
    if args.check:
        fresh = source_hash() in PAGE.read_text(encoding="utf-8")
        print("compile matrix: up to date" if fresh else "compile matrix: stale; run `make matrix`")
        return 0 if fresh else 1
    if args.measure:
        print(json.dumps(measured()))
        return 0
    others = [*args.python, *([newest_interpreter()] if args.newest else [])]
    results = [measured_by(python) for python in (sys.executable, *others)]
    tables = [table(result) for result in results]
    end = f"Sources: `{source_hash()}`. Written by `make matrix`."
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n\n".join([INTRODUCTION, end, *tables]) + "\n", encoding="utf-8")
    return 0


def newest_interpreter() -> str:
    """An environment with the newest Triton in front of everything that this one has."""
    python = NEWEST / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", NEWEST], check=True)
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", "install", *quiet, "--upgrade", "--no-deps", "triton"], check=True)
    library = f"python{sys.version_info.major}.{sys.version_info.minor}"
    rest = NEWEST / "lib" / library / "site-packages" / "rest.pth"
    rest.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return str(python)


def measured_by(python: str) -> dict:
    command = [python, str(Path(__file__)), "--measure"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measured() -> dict:
    """``{"triton": version, "cells": {kernel: {arch: text}}, "limits": {arch: KiB}}`` of this interpreter's Triton."""
    sys.path[:0] = [str(ROOT / "tests" / "compile"), str(ROOT / "src")]
    import triton
    from cross import CannotCompileError, compile_for
    from worst import worst_launches

    from sparse_mla.backends.table import TRITON_ARCHS
    from sparse_mla.device import Device

    cells: dict[str, dict[str, str]] = {}
    for arch in TRITON_ARCHS:
        device = Device.named(arch)
        for name, launch in worst_launches(device).items():
            try:
                took = compile_for(launch, device)
            except CannotCompileError as error:
                print(f"{arch}: {name}: {error}", file=sys.stderr)
                cells.setdefault(name, {})[arch] = "fails"
                continue
            text = f"{took.shared_bytes / 1024:.0f} / {took.registers} / {took.spilled_bytes}"
            cells.setdefault(name, {})[arch] = text if took.shared_bytes <= device.shared_bytes else f"**{text}**"
        print(f"triton {triton.__version__}: {arch}", file=sys.stderr)
    limits = {arch: f"{Device.named(arch).shared_bytes / 1024:.0f}" for arch in TRITON_ARCHS}
    return {"triton": triton.__version__, "cells": cells, "limits": limits}


def table(result: dict) -> str:
    archs = list(result["limits"])
    lines = [
        f"## Triton {result['triton']}",
        "",
        f"| kernel | {' | '.join(archs)} |",
        f"|---|{'---|' * len(archs)}",
        *(
            f"| {name} | {' | '.join(by_arch.get(arch, ABSENT) for arch in archs)} |"
            for name, by_arch in sorted(result["cells"].items())
        ),
        f"| limit, KiB | {' | '.join(result['limits'].values())} |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
