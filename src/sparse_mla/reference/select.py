"""select, by definition: score every visible key in float64, sort by (score descending, position ascending), take K."""

from __future__ import annotations

import torch


def scores(
    index_q: torch.Tensor, index_weights: torch.Tensor, keys: torch.Tensor, k_scale: torch.Tensor
) -> torch.Tensor:
    """Scores ``[S] f64`` of one query token: k_scale[s] · Σ_h weight[h] · relu(q[h] · k[s]).

    Source: DeepSeek-V3.2's lightning indexer; relu keeps a NaN.

    Args:
        index_q: ``[H_i, D_i]`` any float. index_weights: ``[H_i]``. keys: ``[S, D_i]``. k_scale: ``[S]``.
    """
    products = index_q.double() @ keys.double().T
    return (index_weights.double()[:, None] * products.clamp(min=0)).sum(0) * k_scale.double()


def top(row_scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Ascending positions of the ``topk`` best of ``[S]`` scores; equal scores go to the lower position; no NaN."""
    positions = torch.arange(row_scores.numel())[~row_scores.isnan()]
    order = torch.sort(row_scores[positions], descending=True, stable=True).indices
    return positions[order[:topk]].sort().values
