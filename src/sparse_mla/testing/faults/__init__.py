"""Known kinds of fault, put into the real code at the place where each would arise, to show that a check catches them.

Every one passes at short length: with one call, few tokens or no ties nothing is wrong.
"""

from __future__ import annotations

from .caches import CACHES
from .engines import ENGINES
from .fault import Fault, patched
from .outputs import OUTPUTS
from .selections import LAST_K, SELECTIONS, WRONG_SELECTIONS

__all__ = ["FAULTS", "KINDS", "WRONG_SELECTIONS", "Fault", "patched"]

KINDS: tuple[Fault, ...] = (*SELECTIONS, LAST_K, *OUTPUTS, *CACHES, *ENGINES)
"""One of each kind that ``verify --self-test`` must catch."""

FAULTS: tuple[Fault, ...] = (*KINDS, *(fault for fault in WRONG_SELECTIONS if fault is not LAST_K))
"""All that can be put in, by name."""
