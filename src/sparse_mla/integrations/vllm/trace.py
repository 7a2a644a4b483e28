"""SHA-256 of what each operator wrote, row by row, for a comparison between runs that chunk the same prompts otherwise.

With ``SPARSE_MLA_TRACE=FOLDER`` every worker appends to ``FOLDER/PID.jsonl`` one line for each (step, layer, stage,
request): ``{"request", "layer", "stage", "first", "digests"}``: the digest of the row at position ``first``, of the
next one, and so on. Requests are numbered in the order in which they first ran. Reading needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import envs

if TYPE_CHECKING:
    import torch

    from ...cache import CacheView
    from .layer_seams import Step
    from .metadata import SparseMLAMetadata

STAGES = ("index_cache", "selected", "latent_cache", "output")


def folder() -> str:
    """Where traces go; empty for none."""
    return str(envs.get("SPARSE_MLA_TRACE"))


class RequestNumbers:
    """Numbers requests by first appearance. A request is known by its first block, so prefix caching must be off."""

    def __init__(self) -> None:
        self._by_block: dict[int, int] = {}
        self._next = 0

    def of(self, step: Step) -> tuple[int, ...]:
        """The number of each request of the step; −1 for one that has not run yet."""
        blocks = step.block_table[:, 0].tolist()
        numbers = []
        for block, query_len, seq_len in zip(blocks, step.query_lens, step.seq_lens_bound, strict=True):
            if query_len and (query_len == seq_len or block not in self._by_block):
                self._by_block[block] = self._next
                self._next += 1
            numbers.append(self._by_block.get(block, -1))
        return tuple(numbers)


def record(metadata: SparseMLAMetadata, layer: str, **stages: CacheView | torch.Tensor) -> None:
    """Append the rows of this step; a CacheView stands for the rows that the step wrote into it."""
    path = Path(folder())
    path.mkdir(parents=True, exist_ok=True)
    requests, batch = metadata.trace_requests or (), metadata.batch
    with (path / f"{os.getpid()}.jsonl").open("a", encoding="ascii") as out:
        for stage, rows in stages.items():
            digests = [hashlib.sha256(row).hexdigest() for row in _row_bytes(rows, metadata)]
            start = 0
            for request, count, seq_len in zip(requests, batch.query_lens, batch.seq_lens, strict=True):
                line = {"request": request, "layer": layer, "stage": stage, "first": seq_len - count}
                if count:
                    out.write(json.dumps({**line, "digests": digests[start : start + count]}) + "\n")
                start += count


def load(path: str | Path) -> dict[tuple[int, str, str], dict[int, str]]:
    """All traces below a folder: (request, layer, stage) -> position -> digest. A row run twice keeps its last."""
    rows: dict[tuple[int, str, str], dict[int, str]] = {}
    for file in sorted(Path(path).glob("*.jsonl")):
        with file.open(encoding="ascii") as lines:
            for entry in map(json.loads, lines):
                found = rows.setdefault((entry["request"], entry["layer"], entry["stage"]), {})
                found.update(enumerate(entry["digests"], entry["first"]))
    return rows


def _row_bytes(rows: Any, metadata: SparseMLAMetadata) -> list[bytes]:
    import torch

    if isinstance(rows, torch.Tensor):
        flat = rows.detach().reshape(rows.shape[0], -1).contiguous().cpu()
        return [row.tobytes() for row in flat.view(torch.uint8).numpy()]
    slots = metadata.slot_mapping[: sum(metadata.batch.query_lens)].clamp(min=0)
    parts = []
    for field in rows.format.fields:
        values = rows.field(field.name)[slots // rows.block_size, slots % rows.block_size]
        parts.append(values.contiguous().view(torch.uint8).cpu().numpy())
    return [b"".join(part[row].tobytes() for part in parts) for row in range(slots.numel())]
