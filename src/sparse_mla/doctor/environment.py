"""What is here: the machine and the installed packages. Asks files, package metadata and short-lived child processes;
imports neither torch nor any engine, so that it works where they are broken.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine_source.tree import DISTRIBUTIONS
from .logs import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "vllm": DISTRIBUTIONS,
    "sglang": ("sglang",),
    "tensorrt-llm": ("tensorrt-llm",),
    "transformers": ("transformers",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "aiter": ("aiter", "amd-aiter"),
    "deep-gemm": ("deep-gemm", "deep_gemm"),
    "flash-mla": ("flash-mla", "flash_mla"),
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "cudnn-frontend": ("nvidia-cudnn-frontend",),
    "atom": ("atom",),
    "sparse-mla": ("sparse-mla",),
}
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_CHILD_SECONDS = 1.5
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU: ``arch`` as in the compile matrix (sm90, gfx942), memory in bytes (0 when unknown)."""

    vendor: str
    arch: str
    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine. ``cpu_flags`` are the vector and matrix extensions that matter here."""

    system: str
    cpu: str
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    gpus: tuple[Gpu, ...]

    @property
    def vendor(self) -> str:
        """``nvidia``, ``amd`` or ``cpu``."""
        return self.gpus[0].vendor if self.gpus else "cpu"

    @property
    def arch(self) -> str:
        """Architecture of the first GPU, or ``cpu``."""
        return self.gpus[0].arch if self.gpus else "cpu"


def output_of(command: Sequence[str], seconds: float = _CHILD_SECONDS) -> str:
    """Standard output of a child process, or "" when it is missing, fails, or takes longer than ``seconds``."""
    try:
        done = subprocess.run(  # noqa: S603  # fixed commands, no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")[: 1 << 20] if done.returncode == 0 else ""


def machine(run: Callable[[Sequence[str]], str] = output_of, kfd: Path = _KFD) -> Machine:
    """Ask this machine. A GPU is listed only when its driver answers."""
    info = _first_lines(Path("/proc/cpuinfo"))
    flags = set(re.findall(r"\S{1,32}", info.get("flags", "") or info.get("Features", "")))
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=printable(info.get("model name", "") or platform.processor() or platform.machine(), 80),
        cpu_flags=tuple(flag for flag in _CPU_FLAGS if flag in flags),
        memory_bytes=_memory_bytes(),
        gpus=_nvidia(run) or _amd(kfd),
    )


def _first_lines(path: Path) -> dict[str, str]:
    """``key: value`` lines of the first processor in a /proc file."""
    try:
        with path.open(errors="replace") as file:
            text = file.read(1 << 16)
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _nvidia(run: Callable[[Sequence[str]], str]) -> tuple[Gpu, ...]:
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    found = []
    for line in run(["nvidia-smi", query, "--format=csv,noheader,nounits"]).splitlines()[:64]:
        parts = [printable(part.strip(), 80) for part in line.split(",")]
        if len(parts) == 4 and re.fullmatch(r"\d{1,2}\.\d", parts[1]):
            mebibytes = int(parts[2]) if parts[2].isascii() and parts[2].isdecimal() else 0
            found.append(
                Gpu(
                    vendor="nvidia",
                    arch="sm" + parts[1].replace(".", ""),
                    name=parts[0],
                    memory_bytes=mebibytes << 20,
                    driver=parts[3],
                )
            )
    return tuple(found)


def _amd(kfd: Path) -> tuple[Gpu, ...]:
    """AMD's compute driver states each GPU in sysfs; gfx_target_version 90402 is gfx942, 110501 is gfx1151."""
    found = []
    for node in sorted(kfd.glob("*"))[:64] if kfd.is_dir() else ():
        version = _kfd_value(node / "properties", "gfx_target_version")
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            banks = sorted((node / "mem_banks").glob("*/properties"))[:8]
            memory = sum(_kfd_value(bank, "size_in_bytes") for bank in banks)
            name = printable(_text(node / "name").strip(), 80)
            arch = f"gfx{major}{minor:x}{step:x}"
            found.append(Gpu(vendor="amd", arch=arch, name=name or arch, memory_bytes=memory, driver="amdgpu"))
    return tuple(found)


def _kfd_value(file: Path, key: str) -> int:
    match = re.search(rf"^{key} (\d{{1,20}})$", _text(file), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _text(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(1 << 16)
    except OSError:
        return ""


def packages() -> dict[str, str]:
    """Versions of the packages that matter, by the names used in the knowledge base; metadata only."""
    found: dict[str, str] = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                version = metadata.version(distribution)
            except (metadata.PackageNotFoundError, OSError, ValueError, KeyError):
                continue
            if version:
                # Both names: a build's own name tells what it can do.
                found |= {name: version, distribution: version}
                break
    return found


def plugin_registered() -> bool:
    """Whether this package's vLLM plugin is among the installed entry points."""
    try:
        entries = metadata.entry_points(group="vllm.general_plugins")
    except (OSError, ValueError):
        return False
    return any(entry.value.startswith("sparse_mla.") for entry in entries)
