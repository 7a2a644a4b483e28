"""eager beside a straightforward torch version, at 16,384 tokens: the table in docs/performance.md.

    OMP_NUM_THREADS=1 python scripts/straightforward.py

One thread and CPU time, so that a busy machine changes little.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from sparse_mla.bench.cases import Prepared, shapes
from sparse_mla.bench.peers import torch_call
from sparse_mla.device import probe
from sparse_mla.testing.meter import peak_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 64
CONTEXT = 16_384


def straightforward(case: Prepared) -> None:
    """Rows gathered by indexing; every head's scores at once in fp32 and ``topk``, or gather and ``bmm``."""
    positions, size = torch.arange(case.shape.context), case.view.block_size
    blocks, inside = case.batch.block_table[0].long()[positions // size], positions % size
    rows = case.view.field("values")[blocks, inside].float()
    for part in torch.arange(case.query.shape[0]).split(ROWS):
        query = case.query[part].float()
        if case.shape.stage == "attend":
            picked = rows[case.indices[part].long()]
            scores = torch.bmm(query, picked.transpose(1, 2)) * case.dims.softmax_scale
            torch.bmm(scores.softmax(-1), picked[..., : case.dims.kv_lora_rank])
            continue
        keys = rows * case.view.field("scale")[blocks, inside]
        scores = torch.einsum("thd,sd->ths", query, keys).relu_()
        scores = torch.einsum("ths,th->ts", scores, case.weights[part])
        scores.masked_fill_(positions >= case.batch.visible_lens[part, None], -torch.inf)
        scores.topk(case.dims.index_topk, sorted=False)


def seconds(call: Callable[[], object]) -> float:
    """The best of three, after one that warms up."""
    call()
    taken = []
    for _ in range(3):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return min(taken)


def main() -> None:
    torch.set_num_threads(1)
    facts, where = probe("cpu"), torch.device("cpu")
    for shape in (shape for shape in shapes(small=True) if shape.context == CONTEXT):
        case = Prepared(shape, facts, where, backend="eager", strict=True)
        ours, scratch = seconds(case.call), case.plan.stages[shape.stage].scratch_bytes
        print(f"{shape}: eager {ours:.2f} s, {scratch / 2**20:.1f} MiB")
        for name, peer in (("straightforward", straightforward), ("bench's torch", torch_call)):
            took, memory = seconds(partial(peer, case)), peak_bytes(partial(peer, case))
            print(f"  {name}: {took:.2f} s, {took / ours:.1f} x; {memory / 2**20:.0f} MiB, {memory / scratch:.1f} x")


if __name__ == "__main__":
    main()
