"""Selects whose two score kernels do not agree: faults that the kernels do not have, which the check must notice."""

from __future__ import annotations

from sparse_mla.backends.triton.agreement import scores_agree
from sparse_mla.backends.triton.scratch import select_buffers
from sparse_mla.backends.triton.select import Select
from sparse_mla.workspace import Workspace, packed_bytes


class Reordered(Select):
    """Decode adds over heads from the last to the first."""

    def keep(self, run, inputs, longest, scratch):
        if not run.prefill:
            query, weights, *rest = inputs.tensors
            turned = (query.flip(1).contiguous(), weights.flip(1).contiguous())
            inputs = inputs._replace(tensors=(*turned, *rest))
        super().keep(run, inputs, longest, scratch)


class Silent(Select):
    """Prefill keeps no candidate."""

    def keep(self, run, inputs, longest, scratch):
        if not run.prefill:
            super().keep(run, inputs, longest, scratch)


def agree(kind, problem, device, where, spread=8.0):
    """What warm-up asks, of a Select of ``kind``."""
    specs = select_buffers(problem, device, 0)
    workspace = Workspace(where)
    workspace.reserve(packed_bytes(specs))
    return scores_agree(kind(problem, device), problem, workspace.views(specs), where, spread)
