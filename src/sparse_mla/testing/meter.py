"""How much memory a call takes beyond what was there: the peak, counted by the allocator itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable


def peak_bytes(call: Callable[[], object], where: str = "cpu") -> int:
    """Most bytes of torch memory that lived at one time during ``call`` and had not before.

    On a CPU the profiler reports each allocation and release of torch's allocator (a library's own buffers, such as a
    BLAS's packing space, are not torch's and not counted); on a GPU the caching allocator keeps the figure.
    """
    if torch.device(where).type != "cpu":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        call()
        torch.cuda.synchronize(where)
        return torch.cuda.max_memory_allocated(where) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
