"""Compile the worst configuration of every Triton kernel for every architecture and write the table of what it takes.

python scripts/compile_matrix.py           write docs/performance/compile-matrix.md
python scripts/compile_matrix.py --check   fail if the kernels' sources are not those of the committed table
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance" / "compile-matrix.md"
SOURCES = ROOT / "src" / "sparse_mla" / "backends" / "triton"


def source_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(SOURCES.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    if "--check" in sys.argv:
        fresh = source_hash() in PAGE.read_text(encoding="utf-8")
        print("compile matrix: up to date" if fresh else "compile matrix: stale; run `make matrix`")
        return 0 if fresh else 1
    sys.path[:0] = [str(ROOT / "tests" / "compile"), str(ROOT / "src")]
    import triton
    from cross import compile_for
    from worst import worst_launches

    from sparse_mla.backends.table import TRITON_ARCHS
    from sparse_mla.device import Device

    rows: dict[str, list[str]] = {}
    for arch in TRITON_ARCHS:
        device = Device.named(arch)
        for name, launch in worst_launches(device).items():
            took = compile_for(launch, device)
            cell = f"{took.shared_bytes / 1024:.0f} / {took.registers} / {took.spilled_bytes}"
            rows.setdefault(name, []).append(cell if took.shared_bytes <= device.shared_bytes else f"**{cell}**")
        print(f"{arch}: compiled", file=sys.stderr)
    limits = [f"{Device.named(arch).shared_bytes / 1024:.0f}" for arch in TRITON_ARCHS]
    lines = [
        "# What the Triton kernels take, per architecture",
        "",
        "Compiled, not run (but for sm90): 64 index heads, the worst configurations of each kernel, by Triton's own",
        f"compiler targets (triton {triton.__version__}). Each cell: KiB of shared memory (LDS) of a program / registers of a",
        "thread / bytes that spill. The last line is the architecture's limit of shared memory in KiB; bold is above it.",
        f"Sources: `{source_hash()}`. Written by `make matrix`.",
        "",
        f"| kernel | {' | '.join(TRITON_ARCHS)} |",
        f"|---|{'---|' * len(TRITON_ARCHS)}",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
        f"| limit, KiB | {' | '.join(limits)} |",
    ]
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
