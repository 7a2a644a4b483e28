"""How fast a device can gather latent rows at all, for the bench: a kernel that reads listed rows and only adds them up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@triton.jit
def fold_rows(rows, listed, out, LISTED: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr):
    """One program a list: the sum of its rows, each taken as 288 words (576 bf16)."""
    program = tl.program_id(0).to(tl.int64)
    wide = tl.zeros((KEYS, 256), tl.int32)
    narrow = tl.zeros((KEYS, 32), tl.int32)
    for first in tl.range(0, LISTED, KEYS, num_stages=STAGES):
        row = tl.load(listed + program * LISTED + first + tl.arange(0, KEYS))
        start = rows + row.to(tl.int64)[:, None] * 288
        wide += tl.load(start + tl.arange(0, 256)[None, :])
        narrow += tl.load(start + (256 + tl.arange(0, 32))[None, :])
    tl.store(out + program * 288 + tl.arange(0, 256), tl.sum(wide, 0))
    tl.store(out + program * 288 + 256 + tl.arange(0, 32), tl.sum(narrow, 0))


def ways_to_gather(rows: torch.Tensor, listed: torch.Tensor) -> Iterator[Callable[[], None]]:
    """Calls that read ``rows [N, 288] i32`` by ``listed [lists, 64 · n] i32``, in tiles of several sizes and depths."""
    out = torch.empty(len(listed), 288, dtype=torch.int32, device=rows.device)
    for keys in (16, 32, 64):
        for stages in (1, 3):
            options = {"LISTED": listed.shape[1], "KEYS": keys, "STAGES": stages, "num_warps": 4}
            yield partial(launch, fold_rows, (len(listed),), rows, listed, out, **options)
