"""What is known about a device. ``probe`` is the only code that asks hardware; everything else takes a Device."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    import torch

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Facts that decisions use.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``rocm``.
        arch: ``cpu``, ``sm90``, ``gfx942``, ...
        units: multiprocessors, compute units or cores.
        l2_bytes: last-level cache on the chip (per core on a CPU).
        shared_bytes: shared memory (LDS) one program may use; 0 on a CPU.
        fp8: the fp8 encoding that its matrix units take (``fp8``, ``fp8fnuz``), or "" for none.
        name: what the vendor calls it.
    """

    kind: str
    arch: str
    units: int
    l2_bytes: int
    shared_bytes: int
    fp8: str
    name: str = ""

    @classmethod
    def named(cls, arch: str) -> Device:
        """A device that need not be here, for offline answers: one typical part of each architecture.

        Raises:
            UsageError: an architecture outside the table.
        """
        if arch not in KNOWN:
            raise UsageError("unknown architecture", needs=" ".join(KNOWN), got=repr(arch))
        return KNOWN[arch]


def _cuda(arch: str, units: int, l2_mib: int, shared_kib: int, fp8: str, name: str) -> Device:
    return Device(
        kind="cuda",
        arch=arch,
        units=units,
        l2_bytes=l2_mib * _MIB,
        shared_bytes=shared_kib << 10,
        fp8=fp8,
        name=name,
    )


# Shared memory: the CUDA programming guide's table of compute capabilities; LDS: AMD's ISA guides.
KNOWN: dict[str, Device] = {
    device.arch: device
    for device in (
        Device(kind="cpu", arch="cpu", units=2, l2_bytes=2 * _MIB, shared_bytes=0, fp8="", name="CPU"),
        _cuda("sm80", 108, 40, 163, "", "A100"),
        _cuda("sm86", 82, 6, 99, "", "RTX 3090"),
        _cuda("sm89", 128, 72, 99, "fp8", "RTX 4090"),
        _cuda("sm90", 132, 50, 227, "fp8", "H100"),
        _cuda("sm100", 148, 126, 227, "fp8", "B200"),
        _cuda("sm103", 148, 126, 227, "fp8", "B300"),
        _cuda("sm120", 170, 96, 99, "fp8", "RTX 5090"),
        _cuda("sm121", 48, 24, 99, "fp8", "GB10"),
        replace(_cuda("gfx942", 304, 4, 64, "fp8fnuz", "MI300X"), kind="rocm"),
        replace(_cuda("gfx950", 256, 4, 160, "fp8", "MI355X"), kind="rocm"),
        replace(_cuda("gfx1100", 96, 6, 64, "", "RX 7900 XTX"), kind="rocm"),
        replace(_cuda("gfx1151", 40, 2, 64, "", "Ryzen AI Max"), kind="rocm"),
        replace(_cuda("gfx1201", 64, 8, 64, "fp8", "RX 9070 XT"), kind="rocm"),
    )
}


def probe(device: torch.device | str | None = None) -> Device:
    """Ask the machine. An architecture outside the table keeps its own name and gets no fp8 units.

    Args:
        device: a torch device; None takes the CPU.
    """
    import torch

    where = torch.device("cpu" if device is None else device)
    if where.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return replace(KNOWN["cpu"], units=cores, name=platform.processor() or platform.machine())
    if where.type != "cuda" or (where.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {where}", needs="a CPU, or a GPU that this torch sees", got=f"torch {torch.__version__}"
        )
    facts = torch.cuda.get_device_properties(where)
    rocm = torch.version.hip is not None
    arch = facts.gcnArchName.split(":")[0] if rocm else f"sm{facts.major}{facts.minor}"
    shared = getattr(facts, "shared_memory_per_block_optin", None) or (KNOWN[arch].shared_bytes if arch in KNOWN else 0)
    return Device(
        kind="rocm" if rocm else "cuda",
        arch=arch,
        units=facts.multi_processor_count,
        l2_bytes=facts.L2_cache_size,
        shared_bytes=shared,
        fp8=KNOWN[arch].fp8 if arch in KNOWN else "",
        name=facts.name,
    )
