"""The hashes that an engine's operators wrote while it served: SHA-256 of each row of each stage of each layer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import NotCheckableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STAGES = {"index_cache": "write", "latent_cache": "write", "selected": "select", "output": "attend"}
"""Stages of a trace in the order in which a fault would travel through them, and their verbs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTrace:
    """One prompt under one chunk plan.

    Attributes:
        rows: (stage, layer) -> position -> digest.
        starts: position of the first token of each engine step.
    """

    rows: Mapping[tuple[str, str], Mapping[int, str]]
    starts: tuple[int, ...]

    def sha256(self, stage: str) -> str:
        """One hash for a stage: over the digests of all layers by name, each in order of position."""
        whole = hashlib.sha256()
        for name, layer in sorted(self.rows):
            if name == stage:
                rows = self.rows[name, layer]
                whole.update(layer.encode() + b"".join(bytes.fromhex(rows[position]) for position in sorted(rows)))
        return whole.hexdigest()

    def first_difference(self, other: EngineTrace, stage: str) -> str:
        """The first row of a stage that differs, as text; empty if none does."""
        for name, layer in sorted(self.rows.keys() | other.rows.keys()):
            mine, theirs = self.rows.get((name, layer), {}), other.rows.get((name, layer), {})
            differs = [
                position for position in mine.keys() | theirs.keys() if mine.get(position) != theirs.get(position)
            ]
            if name == stage and differs:
                return f"{layer}, token {min(differs)}"
        return ""


def load(folder: Path) -> EngineTrace:
    """Read what ``SPARSE_MLA_TRACE=folder`` left behind for one request.

    Raises:
        NotCheckableError: nothing was traced, so other operators than ours served.
    """
    rows: dict[tuple[str, str], dict[int, str]] = {}
    starts = set()
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="ascii") as lines:
            for entry in map(json.loads, lines):
                starts.add(int(entry["first"]))
                found = rows.setdefault((entry["stage"], entry["layer"]), {})
                found.update(enumerate(entry["digests"], int(entry["first"])))
    missing = set(STAGES) - {stage for stage, _ in rows}
    if missing:
        hint = "Other operators than sparse-mla's served: see SPARSE_MLA_VLLM."
        raise NotCheckableError(f"no trace of {min(missing)}", hint=hint)
    return EngineTrace(rows=rows, starts=tuple(sorted(starts)))
