"""The same stages in plain torch, which is always there: what a user without kernels would write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .cases import Prepared

_TOKENS = 256


def torch_call(case: Prepared) -> None:
    """One call in torch; only for shapes of one request, whose rows are gathered in a flat copy first."""
    positions = torch.arange(case.shape.context, device=case.where)
    size = case.view.block_size
    blocks = case.batch.block_table[0].long()[positions // size]
    rows = case.view.field("values")[blocks, positions % size].bfloat16()
    if case.shape.stage == "attend":
        _attend(case, rows)
        return
    scale = case.view.field("scale")[blocks, positions % size, 0]
    for part in torch.arange(case.query.shape[0], device=case.where).split(_TOKENS):
        scores = torch.zeros(part.numel(), rows.shape[0], device=case.where)
        for head in range(case.shape.heads):
            product = case.query[part, head].bfloat16() @ rows.T
            scores += product.relu_().float() * case.weights[part, head, None]
        scores *= scale
        scores.masked_fill_(positions >= case.batch.visible_lens[part, None], -torch.inf)
        scores.topk(min(case.dims.index_topk, rows.shape[0]), sorted=False)


def _attend(case: Prepared, rows: torch.Tensor) -> None:
    for part in torch.arange(case.query.shape[0], device=case.where).split(_TOKENS):
        picked = rows[case.indices[part].long()]
        score = torch.bmm(case.query[part], picked.transpose(1, 2)).float() * case.dims.softmax_scale
        torch.bmm(score.softmax(-1).bfloat16(), picked[..., : case.dims.kv_lora_rank])
