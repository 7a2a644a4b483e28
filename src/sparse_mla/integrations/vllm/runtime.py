"""The operators of one worker: bound once, shared by its layers, compared with the reference before the first request."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from ...attention import SparseMLA
from ...errors import BackendRejectedError, ConfigError
from ...workspace import Workspace
from .start_check import differences

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from ...dims import MLADims
    from ...plan import Plan
    from ...problem import Problem

_RUNTIMES: weakref.WeakValueDictionary[tuple[Problem, str], Runtime] = weakref.WeakValueDictionary()


class Runtime:
    """One SparseMLA and its workspace. The layers of a worker run on one stream, so they share it."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        workspace = Workspace(device)
        self.attention = SparseMLA(plan, workspace, device)
        self.attention.warm_up()
        workspace.fill(0)  # touched now, so that the engine's memory accounting sees it before it sizes the cache
        workspace.lock()
        self.plan = self.attention.plan  # another one where a kernel did not compile
        self._proved = False

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> Runtime:
        """The runtime of this process for a plan; equal problems (a model and its draft) share one."""
        key = (plan.problem, str(device))
        found = _RUNTIMES.get(key)
        if found is None:
            found = _RUNTIMES[key] = cls(plan, device)
        return found

    def prove(self) -> None:
        """Compare the bound kernels with the reference on this device, once.

        Raises:
            BackendRejectedError: they differ; nothing is served.
        """
        if self._proved:
            return
        found = differences(self.attention)
        if found:
            headline = (
                f"sparse-mla's operators differ from the reference on {self.plan.device.arch}, so nothing is served"
            )
            raise BackendRejectedError(headline, found, "Run `sparse-mla verify` and report its output.")
        self._proved = True


def require_schedule(dims: MLADims, built: Mapping[int, bool]) -> None:
    """Refuse layers that would read indices which no earlier layer of this worker wrote in the same pass.

    Args:
        built: layer number -> whether it has an indexer, for this worker's layers; layers past the config's are drafts.

    Raises:
        ConfigError: the engine built another schedule than the config states, or a pipeline stage starts on a layer
            without an indexer.
    """
    layers = {number: own for number, own in sorted(built.items()) if number < dims.num_layers}
    for number, own in layers.items():
        if own != dims.owns_indexer[number]:
            words = {True: "an indexer of its own", False: "another layer's indices"}
            pattern = "".join("F" if stated else "S" for stated in dims.owns_indexer)
            raise ConfigError(
                f"vLLM built layer {number} otherwise than the config states",
                needs=words[dims.owns_indexer[number]],
                got=words[own],
                hint="vLLM does not read indexer_types: "
                f"""start it with --hf-overrides '{{"index_topk_pattern": "{pattern}"}}'.""",
            )
    first = min(layers, default=None)
    if first is not None and not layers[first]:
        raise ConfigError(
            f"this pipeline stage starts on layer {first}",
            needs="a layer with an indexer of its own",
            got="one that reuses another stage's indices",
            hint="Choose another pipeline split (VLLM_PP_LAYER_PARTITION).",
        )
