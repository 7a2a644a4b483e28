"""A Select whose decode adds over index heads in another order: what the check of agreement must notice."""

from __future__ import annotations

from sparse_mla.backends.triton.select import Select


class Reordered(Select):
    """A fault that the kernels do not have: heads are handed to decode from the last to the first."""

    def keep(self, run, inputs, longest, scratch):
        if not run.prefill:
            query, weights, *rest = inputs.tensors
            turned = (query.flip(1).contiguous(), weights.flip(1).contiguous())
            inputs = inputs._replace(tensors=(*turned, *rest))
        super().keep(run, inputs, longest, scratch)
