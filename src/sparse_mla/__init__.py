"""sparse-mla: DeepSeek Sparse Attention (write, select, attend) on every device, and proof that it is right.

Start reading at ``sparse_mla/attention.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionOutput, SparseMLA
    from .batch import BatchLayout
    from .cache import CacheFormat, CacheView
    from .device import Device, probe
    from .dims import MLADims
    from .errors import SparseMLAError
    from .plan import Plan, make_plan
    from .problem import Problem
    from .resolve import resolve
    from .workspace import Workspace

__version__ = "0.1.0"

_HOME = {
    "AttentionOutput": "attention",
    "BatchLayout": "batch",
    "CacheFormat": "cache",
    "CacheView": "cache",
    "Device": "device",
    "MLADims": "dims",
    "Plan": "plan",
    "Problem": "problem",
    "SparseMLA": "attention",
    "SparseMLAError": "errors",
    "Workspace": "workspace",
    "make_plan": "plan",
    "probe": "device",
    "resolve": "resolve",
}
__all__ = [
    "AttentionOutput",
    "BatchLayout",
    "CacheFormat",
    "CacheView",
    "Device",
    "MLADims",
    "Plan",
    "Problem",
    "SparseMLA",
    "SparseMLAError",
    "Workspace",
    "make_plan",
    "probe",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing the package loads neither torch nor anything optional."""
    if name not in _HOME:
        raise AttributeError(f"module 'sparse_mla' has no attribute {name!r}")
    return getattr(import_module(f"sparse_mla.{_HOME[name]}"), name)
