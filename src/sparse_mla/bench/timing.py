"""Medians of device time, and what the device could do at best, measured in the same run."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from ..errors import KernelError

if TYPE_CHECKING:
    from collections.abc import Callable

_REPEATS = 15
_FLUSH_BYTES = 256 << 20
"""Written before each repeat, so that no run finds its inputs in a cache."""


def median_us(call: Callable[[], object], where: torch.device, *, graph: bool = False) -> float:
    """Median time of a call in µs, caches cold; with ``graph`` its launches are captured once and replayed."""
    call()
    if where.type == "cpu":
        return float(median(_cpu_us(call) for _ in range(3)))
    torch.cuda.synchronize(where)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        call = captured.replay
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=where)
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_REPEATS)]
    for (
        begin,
        end,
    ) in events:  # no waiting between repeats: a launch is not to be timed before the device is ready for it
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(where)
    return float(median(begin.elapsed_time(end) * 1e3 for begin, end in events))


def _cpu_us(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return (perf_counter() - start) * 1e6


def ceilings(where: torch.device) -> dict[str, float]:
    """``copy_gbps`` (bytes read plus written), ``gather_gbps`` of random latent rows, ``matmul_tflops`` in bf16.

    Rows are gathered by torch, copied (read plus written), and by a kernel of our own that only reads; the better counts.
    """
    small = where.type == "cpu"
    count = (64 if small else 1024) << 20
    source = torch.empty(count, dtype=torch.uint8, device=where).random_()
    target = torch.empty_like(source)
    copy = 2 * count / median_us(lambda: target.copy_(source), where) / 1e3
    rows = torch.randn(8192 if small else 131072, 576, device=where).bfloat16()
    picked = torch.randint(0, len(rows), (len(rows) * (1 if small else 16),), device=where)
    gathered = torch.empty(len(picked), 576, dtype=rows.dtype, device=where)
    copied = median_us(lambda: torch.index_select(rows, 0, picked, out=gathered), where)
    gather = 2 * len(picked) * 1152 / copied / 1e3
    if not small and find_spec("triton"):
        from ..backends.triton.gather_ceiling import ways_to_gather

        listed = torch.randint(0, len(rows), (4096, 2048), dtype=torch.int32, device=where)
        for way in ways_to_gather(rows.view(torch.int32), listed):
            with suppress(KernelError):  # the largest tile fits into few devices
                gather = max(gather, listed.numel() * 1152 / median_us(way, where) / 1e3)
    size = 1024 if small else 8192
    left, right = (torch.randn(size, size, device=where).bfloat16() for _ in range(2))
    matmul = 2 * size**3 / median_us(lambda: left @ right, where) / 1e6
    return {
        "copy_gbps": copy,
        "gather_gbps": gather,
        "matmul_tflops": matmul,
    }
