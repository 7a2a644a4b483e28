"""Others at the same work: plain torch, which is always there, and vendors' kernels where they can be imported.

A vendor's kernel gets what it wants (rows in one flat tensor, heads padded) before the clock starts. Its answer is judged
like ours before it is timed; whatever it raises is its result.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .cases import Prepared

_TOKENS = 256
_FLASH_MLA_HEADS = 64


def torch_call(case: Prepared) -> None:
    """One call in torch, as a user without kernels would write it; only for shapes of one request."""
    rows = _flat(case, "values").bfloat16()
    if case.shape.stage == "attend":
        _attend(case, rows)
        return
    positions, scale = torch.arange(case.shape.context, device=case.where), _flat(case, "scale")[:, 0]
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


def _flat(case: Prepared, field: str) -> torch.Tensor:
    """A field of the one request's rows in logical order, ``[S, width]``."""
    positions, size = torch.arange(case.shape.context, device=case.where), case.view.block_size
    blocks = case.batch.block_table[0].long()[positions // size]
    return case.view.field(field)[blocks, positions % size]


def _flash_mla(module: Any, case: Prepared) -> Callable[[], torch.Tensor]:
    """``flash_mla_sparse_fwd``: heads in multiples of 64. Source: the FlashMLA repository, flash_mla_interface.py."""
    heads, rows = case.shape.heads, _flat(case, "values")[:, None].contiguous()
    missing = -heads % _FLASH_MLA_HEADS
    query = torch.nn.functional.pad(case.query, (0, 0, 0, missing))
    indices = case.indices[:, None].contiguous()
    scale, rank = case.dims.softmax_scale, case.dims.kv_lora_rank

    def call() -> torch.Tensor:
        out: torch.Tensor = module.flash_mla_sparse_fwd(query, rows, indices, scale, rank)[0]
        return out[:, :heads]

    return call


def _deep_gemm(module: Any, case: Prepared) -> Callable[[], torch.Tensor]:
    """``fp8_mqa_logits`` into one matrix, then ``torch.topk``. Source: the DeepGEMM repository, attention kernels."""
    keys = (_flat(case, "values").contiguous(), _flat(case, "scale")[:, 0].contiguous())
    visible, topk = case.batch.visible_lens, case.dims.index_topk
    begin = torch.zeros_like(visible)

    def call() -> torch.Tensor:
        scores: torch.Tensor = module.fp8_mqa_logits(case.query, keys, case.weights, begin, visible)
        return scores.topk(topk, sorted=False).indices

    return call


PEERS = {"flash_mla": ("attend", _flash_mla), "deep_gemm": ("select", _deep_gemm)}
"""By the module that is imported: the stage, and what makes a call of it for a case."""


def importable(stage: str) -> Iterator[tuple[str, Callable[[Prepared], Callable[[], torch.Tensor]]]]:
    """Vendors' kernels for a stage that are installed here."""
    for name, (serves, make) in PEERS.items():
        if serves != stage:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        yield name, lambda case, make=make, module=module: make(module, case)  # type: ignore[misc]
