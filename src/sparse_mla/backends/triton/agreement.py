"""Whether the two score kernels agree to the bit on a device, which strict mode promises: ``warm_up`` asks.

They add over index heads in one order. But one has the keys on the left of its product and the other on the right, and in
what order matrix units add up a product no manual says. So it is tried.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...batch import BatchLayout
from ...cache import CacheView
from .operands import torch_dtype
from .runs import Run
from .tuning import DECODE_THRESHOLD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...problem import Problem
    from .select import Select

_ROWS = 65
"""More than one tile of rows: so that the large products are tried beside the small ones of short calls."""
_KEYS = 128


def scores_agree(
    select: Select, problem: Problem, scratch: Mapping[str, torch.Tensor], where: torch.device, spread: float = 8.0
) -> bool:
    """Compare the scores of random rows and keys, whose values span ``spread`` powers of two either way."""
    dims, few, random = problem.dims, DECODE_THRESHOLD + 1, torch.Generator(where).manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        exponent = torch.empty(shape, dtype=torch.float32, device=where).uniform_(-spread, spread, generator=random)
        return (torch.empty_like(exponent).normal_(generator=random) * torch.exp2(exponent)).clamp_(-240.0, 240.0)

    keys = min(_KEYS, select.capacity)  # as many are kept without a limit, and what is kept holds the score
    blocks = -(-keys // problem.index_block_size)
    size = (blocks, problem.index_block_size, problem.index.row_bytes)
    view = CacheView.of(torch.zeros(size, dtype=torch.uint8, device=where), problem.index)
    stored = view.field("values")
    stored.copy_(values(*stored.shape))
    if problem.index.rule is not None:
        scale = view.field("scale")
        scale.copy_(values(*scale.shape).abs())
    query = values(_ROWS, dims.index_n_heads, dims.index_head_dim)
    weights = values(_ROWS, dims.index_n_heads)
    table = torch.arange(blocks, dtype=torch.int32, device=where).expand(few, blocks).contiguous()

    def kept(query_lens: tuple[int, ...], dtype: torch.dtype, *, prefill: bool) -> torch.Tensor:
        rows = sum(query_lens)
        request = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
        batch = BatchLayout(
            req_id_per_token=request.to(where, torch.int32),
            visible_lens=torch.full((rows,), keys, dtype=torch.int32, device=where),
            block_table=table[: len(query_lens)],
            query_lens=query_lens,
            seq_lens=(keys,) * len(query_lens),
        )
        scratch["pool"].zero_()  # a kernel that keeps nothing would else leave what the other one kept
        inputs = select.inputs(query[:rows].to(dtype), weights[:rows], view, batch)
        select.keep(Run(0, rows, prefill), inputs, keys, scratch)
        words = scratch["pool"].view(torch.int64)[: few * select.capacity].view(few, select.capacity)
        return words[:, :keys].sort(1).values

    for name in dict.fromkeys((problem.index.encoding, problem.dtype)):
        dtype = torch_dtype(name)
        decoded = kept((1,) * few, dtype, prefill=False)
        if not all(torch.equal(decoded, kept((rows,), dtype, prefill=True)) for rows in (few, _ROWS)):
            return False
    return True
