"""A scheduler step as a BatchLayout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...batch import BatchLayout

if TYPE_CHECKING:
    from .layer_seams import Step


def layout(step: Step) -> BatchLayout:
    """The causal layout, from the device's own lengths: the host's may be upper bounds."""
    device, requests, real = step.block_table.device, len(step.query_lens), sum(step.query_lens)
    counts = step.query_start_loc.diff().long()
    owner = torch.repeat_interleave(torch.arange(requests, device=device), counts, output_size=real)
    ends = step.query_start_loc[1:].long()[owner]
    visible = step.seq_lens.long()[owner] - ends + torch.arange(1, real + 1, device=device)
    padding = (0, step.num_tokens - real)
    return BatchLayout(
        req_id_per_token=torch.nn.functional.pad(owner, padding, value=-1).int(),
        visible_lens=torch.nn.functional.pad(visible.clamp_(min=0), padding).int(),
        block_table=step.block_table,
        query_lens=tuple(step.query_lens),
        seq_lens=tuple(step.seq_lens_bound),
    )
