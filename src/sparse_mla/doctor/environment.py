"""What is here: the machine and the installed packages. Asks files, package metadata and the GPU vendors' tools; imports
neither torch nor any engine, so that it works where they are broken.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine_source.tree import DISTRIBUTIONS
from . import gpus
from .logs import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .gpus import Gpu

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
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve")


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


def machine(ask_gpus: Callable[[], tuple[Gpu, ...]] = gpus.found) -> Machine:
    """Ask this machine. A GPU is listed only when its driver answers."""
    info = _first_lines(Path("/proc/cpuinfo"))
    flags = set(re.findall(r"\S{1,32}", info.get("flags", "") or info.get("Features", "")))
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        cpu=printable(info.get("model name", "") or platform.processor() or platform.machine(), 80),
        cpu_flags=tuple(flag for flag in _CPU_FLAGS if flag in flags),
        memory_bytes=_memory_bytes(),
        gpus=ask_gpus(),
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
