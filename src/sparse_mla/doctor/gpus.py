"""Which GPUs are here: the vendors' own tools, asked side by side under one time limit, and AMD's files in sysfs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .logs import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SYSFS = Path("/sys")
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits")
AMD_SMI = ("amd-smi", "static", "--asic", "--vram", "--driver", "--json")
ROCMINFO = ("rocminfo",)
_SECONDS = 1.3
_OUTPUT_BYTES = 1 << 20
_MAX_GPUS = 64
_GFX = re.compile(r"gfx[0-9a-f]{3,6}")
_UNITS = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU: ``arch`` as in the compile matrix (sm90, gfx942), memory in bytes (0 when unknown), driver version ("" when
    unknown), and who said so.
    """

    vendor: str
    arch: str
    name: str
    memory_bytes: int
    driver: str
    source: str


def outputs_of(commands: Sequence[Sequence[str]], seconds: float = _SECONDS) -> list[str]:
    """Standard output of child processes that run side by side: "" for one that is missing, fails, prints more than a
    mebibyte, or is not done after ``seconds``. Such a one is ended together with what it started.
    """
    started = [_started(command) for command in commands]
    texts = [bytearray() for _ in commands]
    done = [False for _ in commands]
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for number, child in enumerate(started):
            if child is not None and child.stdout is not None:
                waiting.register(child.stdout, selectors.EVENT_READ, number)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                piece = os.read(key.fd, 1 << 16)
                texts[key.data] += piece
                done[key.data] = not piece
                if not piece or len(texts[key.data]) > _OUTPUT_BYTES:
                    waiting.unregister(key.fileobj)
    codes = [_ended(child, deadline, whole) for child, whole in zip(started, done, strict=True)]
    return [text.decode(errors="replace") if code == 0 else "" for text, code in zip(texts, codes, strict=True)]


def _started(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    if "\0" in command[0] or shutil.which(command[0]) is None:
        return None  # most machines have none of the tools, and to learn that from a child takes its time
    try:
        return subprocess.Popen(  # noqa: S603  # fixed commands, no shell
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError):
        return None


def _ended(child: subprocess.Popen[bytes] | None, deadline: float, whole: bool) -> int | None:
    """Exit code of a child whose ``whole`` output was read and that ends by ``deadline``; others are ended, with None."""
    if child is None or child.stdout is None:
        return None
    try:
        return child.wait(max(deadline - time.monotonic(), 0.01)) if whole else None
    except subprocess.TimeoutExpired:
        return None
    finally:
        if not whole or child.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def found(run: Callable[[Sequence[Sequence[str]]], Sequence[str]] = outputs_of, sysfs: Path = SYSFS) -> tuple[Gpu, ...]:
    """The GPUs of this machine, from the first source that lists any: nvidia-smi, amd-smi, rocminfo, sysfs."""
    nvidia, amd, rocm = run((NVIDIA_SMI, AMD_SMI, ROCMINFO))
    answers = (_nvidia(nvidia), _amd(amd), _rocminfo(rocm), _sysfs(sysfs))
    return next((gpus for answer in answers if (gpus := tuple(answer))), ())


def _nvidia(text: str) -> Iterator[Gpu]:
    for line in text.splitlines()[:_MAX_GPUS]:
        parts = [printable(part.strip(), 80) for part in line.split(",")]
        if len(parts) == 4 and re.fullmatch(r"\d{1,2}\.\d", parts[1]):
            yield Gpu(
                vendor="nvidia",
                arch="sm" + parts[1].replace(".", ""),
                name=parts[0],
                memory_bytes=_count(parts[2]) << 20,
                driver=parts[3],
                source="nvidia-smi",
            )


def _amd(text: str) -> Iterator[Gpu]:
    """``amd-smi static --json``: a list with an object for each GPU, since ROCm 7 under the key ``gpu_data``."""
    try:
        answer = json.loads(text) if text else []
    except (ValueError, RecursionError):
        return
    entries = answer.get("gpu_data") if isinstance(answer, dict) else answer
    for entry in entries[:_MAX_GPUS] if isinstance(entries, list) else ():
        asic, driver = _object(entry, "asic"), _object(entry, "driver")
        arch = _GFX.match(str(asic.get("target_graphics_version", "")))
        if arch:
            size = _object(_object(entry, "vram"), "size")
            yield Gpu(
                vendor="amd",
                arch=arch.group(),
                name=_words(asic.get("market_name")) or arch.group(),
                memory_bytes=_count(str(size.get("value"))) * _UNITS.get(str(size.get("unit")), 1 << 20),
                driver=_words(driver.get("version") or driver.get("driver_version")),
                source="amd-smi",
            )


def _rocminfo(text: str) -> Iterator[Gpu]:
    """``rocminfo``: agents one below the other, each with its name and its memory pools. It prints text only."""
    version = re.search(r"^ROCk module version (\S{1,64}) is loaded", text, re.MULTILINE)
    for agent in re.split(r"^Agent \d{1,4}\s*$", text, flags=re.MULTILINE)[1 : _MAX_GPUS + 1]:
        arch = re.search(rf"^\s{{0,8}}Name:\s{{1,64}}({_GFX.pattern})\s*$", agent, re.MULTILINE)
        if arch:
            name = re.search(r"^\s{0,8}Marketing Name:[ \t]{1,64}(\S.{0,80})$", agent, re.MULTILINE)
            pools = re.findall(r"Segment:\s{1,64}GLOBAL[^\n]{0,80}\n\s{0,16}Size:\s{1,64}(\d{1,15})\(", agent)
            yield Gpu(
                vendor="amd",
                arch=arch.group(1),
                name=_words(name.group(1)) if name else arch.group(1),
                memory_bytes=max(map(int, pools), default=0) << 10,
                driver=printable(version.group(1)) if version else "",
                source="rocminfo",
            )


def _sysfs(root: Path) -> Iterator[Gpu]:
    """AMD's compute driver states each GPU in sysfs; gfx_target_version 90402 is gfx942, 110501 is gfx1151."""
    nodes = root / "class" / "kfd" / "kfd" / "topology" / "nodes"
    for node in sorted(nodes.glob("*"))[:_MAX_GPUS] if nodes.is_dir() else ():
        version = _kfd_value(node / "properties", "gfx_target_version")
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            banks = sorted((node / "mem_banks").glob("*/properties"))[:8]
            arch = f"gfx{major}{minor:x}{step:x}"
            yield Gpu(
                vendor="amd",
                arch=arch,
                name=_words(_text(node / "name")) or arch,
                memory_bytes=sum(_kfd_value(bank, "size_in_bytes") for bank in banks),
                driver=_words(_text(root / "module" / "amdgpu" / "version")),
                source="sysfs",
            )


def _object(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _words(value: object) -> str:
    """A name as a tool states it; "" for its ways of saying that it does not know."""
    text = printable(value.strip(), 80) if isinstance(value, str) else ""
    return "" if text in {"N/A", "Unknown"} else text


def _count(text: str) -> int:
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else 0


def _kfd_value(file: Path, key: str) -> int:
    match = re.search(rf"^{key} (\d{{1,20}})$", _text(file), re.MULTILINE)
    return int(match.group(1)) if match else 0


def _text(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(1 << 16)
    except OSError:
        return ""
