"""attend, by definition: softmax over the selected rows in float64."""

from __future__ import annotations

import torch


def attend(
    q: torch.Tensor, latent: torch.Tensor, softmax_scale: float, kv_lora_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token over its selected rows.

    Args:
        q: ``[H, D_c + D_r]``. latent: ``[N, D_c + D_r]``, one row for each index that is not −1 (duplicates repeated).

    Returns:
        ``[H, D_c] f64`` and lse ``[H] f64``; 0 and −inf where there is no row or every score is −inf.
    """
    scaled = q.double() @ latent.double().T * softmax_scale
    lse = torch.logsumexp(scaled, -1) if latent.shape[0] else torch.full(q.shape[:1], -torch.inf, dtype=torch.float64)
    weights = torch.where((lse == -torch.inf)[:, None], 0.0, (scaled - lse[:, None]).exp())
    return weights @ latent[:, :kv_lora_rank].double(), lse
