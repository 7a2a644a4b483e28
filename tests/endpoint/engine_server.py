"""vLLM's own OpenAI server, in which a fault can be switched on while it runs: the file $FAULT_SWITCH names one.

``third chunk``, as when a plan is cached under too small a key: from its third chunk on, a prefill gets what was selected
for its first. ``length``, as where a buffer overflows: it gets that above 512 tokens, in whichever chunk.
Run with the arguments of vllm.entrypoints.openai.api_server; its child processes import this file, and so have the fault.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_mla.attention import SparseMLA

if TYPE_CHECKING:
    import torch

FAULT = Path(os.environ["FAULT_SWITCH"])
TOO_LONG = 512
_right = SparseMLA.select
_chunks: dict[tuple[int, int], tuple[int, int, torch.Tensor]] = {}


def select(self, index_q, index_weights, view, batch, out=None, lens=None):
    """The right selection, replaced where the fault that is switched on has it so."""
    fault = FAULT.read_text() if FAULT.exists() else ""
    found = _right(self, index_q, index_weights, view, batch, out=out, lens=lens)
    start = 0
    for request, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        rows = found[start : start + count]
        key = id(view.storage), int(batch.block_table[request, 0])  # a layer and a request
        seen, number, first = _chunks.get(key, (-1, 0, rows))
        if count > 1:
            number, first = (number + 1, first) if length - count == seen else (1, rows.clone())
            _chunks[key] = length, number, first
            if (fault == "third chunk" and number >= 3) or (fault == "length" and number > 1 and length > TOO_LONG):
                rows[: len(first)] = first[: len(rows)]
        start += count
    return found


SparseMLA.select = select

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
