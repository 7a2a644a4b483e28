"""Everything that only a GPU can show, in one run: tests, conformance and verify side by side, then what is timed, alone.

    python scripts/on_gpu.py OUT [--only TEXT]

Writes each part's output to OUT/<part>.txt as it comes, prints how each ended, and exits with 1 if one failed. Conformance
is spread over processes where pytest-xdist is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERIFY = ("-m", "sparse_mla", "verify", "--device", "cuda", "--backend", "triton", "--lengths")
BENCH = ("-m", "sparse_mla", "bench", "--device", "cuda", "--backend", "triton")
JUDGED = ("--backend", "triton", "--device", "cuda", "--tag", "ci", "--tag", "full", "--tag", "bench")
SPREAD = ("-n", "8") if importlib.util.find_spec("xdist") else ()
INSTALLED = any(point.value == "sparse_mla.testing.plugin" for point in entry_points(group="pytest11"))
SUITE = (
    "-c",
    os.devnull,
    *(() if INSTALLED else ("-p", "sparse_mla.testing.plugin")),
    "--pyargs",
    "sparse_mla.testing",
)
TOGETHER = {
    "gpu-tests": ("-m", "pytest", "-q", "-W", "default", "-m", "gpu", "tests/triton"),
    "conformance": ("-m", "pytest", "-q", *SPREAD, *SUITE, *JUDGED),
    **{
        f"verify-{lengths.replace(',', '-')}": (*VERIFY, lengths)
        for lengths in ("20000,40000", "60000", "80000", "100000", "1000000")
    },
}
ALONE = {
    "bench": (*BENCH, "--format", "json"),
    "bench-strict": (*BENCH, "--strict", "--only", "attend 4096"),
    "distributions": ("scripts/distributions.py",),
    "distributions-300000": ("scripts/distributions.py", "--context", "300000"),
    "distributions-800000": ("scripts/distributions.py", "--context", "800000", "--rows", "64"),
}


def run(name: str, command: tuple[str, ...], out: Path, threads: int) -> bool:
    """Whether a part ended well; says so, and how long it took."""
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (out / f"{name}.txt").open("w") as file:
        ended = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    print(f"{name}: exit code {ended.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return ended.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="only parts whose name contains it")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(len(TOGETHER)) as pool:
        together = [
            pool.submit(run, name, command, args.out, max(1, cores // len(TOGETHER)))
            for name, command in TOGETHER.items()
            if args.only in name
        ]
    ended = [part.result() for part in together]
    ended += [run(name, command, args.out, cores) for name, command in ALONE.items() if args.only in name]
    return 0 if ended and all(ended) else 1


if __name__ == "__main__":
    raise SystemExit(main())
