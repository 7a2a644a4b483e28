"""The operators of one worker: bound once, shared by its layers, compared with the reference before the first request."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ...attention import SparseMLA
from ...workspace import Workspace

if TYPE_CHECKING:
    from ...plan import Plan
    from ...problem import Problem

_RUNTIMES: weakref.WeakValueDictionary[tuple[Problem, str], Runtime] = weakref.WeakValueDictionary()


class Runtime:
    """One SparseMLA and its workspace. All layers of a worker run on one stream and share it."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        workspace = Workspace(device)
        self.attention = SparseMLA(plan, workspace, device)
        self.attention.warm_up()
        workspace.fill(0)  # touched now, so that the engine's memory accounting sees it before it sizes the cache
        workspace.lock()
        self.plan = plan
        self.device = device

    @classmethod
    def of(cls, plan: Plan, device: torch.device) -> Runtime:
        """The runtime of this process for a plan; equal problems (a model and its draft) share one."""
        key = (plan.problem, str(device))
        found = _RUNTIMES.get(key)
        if found is None:
            found = _RUNTIMES[key] = cls(plan, device)
        return found
