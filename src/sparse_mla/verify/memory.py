"""The memory guard: what is free, asked before a case takes any of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import NotCheckableError

if TYPE_CHECKING:
    import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_host_bytes() -> int | None:
    """Memory that this process may still take: what the kernel calls available, within the container's limit."""
    free = [_meminfo("MemAvailable")]
    for limit_file, usage_file in _CGROUPS:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is not None and usage is not None:
            free.append(limit - usage)
    known = [count for count in free if count is not None]
    return min(known, default=None)


def free_device_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU; on a CPU, of the host."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def require(what: str, needs: int, free: int | None) -> None:
    """Refuse before anything is allocated.

    Raises:
        NotCheckableError: ``needs`` bytes are not free. Where the system does not say, nothing is refused.
    """
    if free is not None and needs > free:
        hint = "Use shorter --lengths, or a machine with more memory."
        raise NotCheckableError(f"too little memory for {what}", needs=_gib(needs), got=f"{_gib(free)} free", hint=hint)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{key}:")), None)
    return int(found.split()[1]) * 1024 if found else None


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
