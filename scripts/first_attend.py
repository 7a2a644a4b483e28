"""Has the first attend of a fresh process the bits of the later ones? On busy cores, where setting up is a race if anywhere.

Each trial is a fork of a process that has torch loaded and has computed nothing. Run two or three at once on two cores:

    python scripts/first_attend.py --seconds 90
"""

from __future__ import annotations

import argparse
import os
import time

import torch

from sparse_mla import attention, plan
from sparse_mla.batch import BatchLayout
from sparse_mla.cache import CacheView, index_fp8, plain
from sparse_mla.device import Device
from sparse_mla.dims import MLADims
from sparse_mla.problem import Problem
from sparse_mla.workspace import Workspace

TOKENS, TOPK, HEADS = 24, 2048, 16


def same() -> bool:
    """Whether three calls of attend, the first ones of this process, give the same bits."""
    dims = MLADims(
        num_heads=HEADS,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=192,
        v_head_dim=256,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=TOPK,
        owns_indexer=(True,),
    )
    problem = Problem(
        dims=dims,
        dtype="bf16",
        latent=plain(576, "bf16"),
        index=index_fp8(128),
        latent_block_size=64,
        index_block_size=64,
        max_num_tokens=64,
        max_num_requests=1,
        max_model_len=4096,
    )
    kernels = attention.SparseMLA(plan.make_plan(problem, Device.named("cpu")), Workspace())
    source = torch.Generator().manual_seed(0)
    blocks = torch.randn(64, 64, 576, generator=source).bfloat16()
    queries = torch.randn(TOKENS, HEADS, 576, generator=source).bfloat16()
    indices = torch.arange(TOPK, dtype=torch.int32).repeat(TOKENS, 1)
    indices[indices > torch.arange(TOKENS)[:, None]] = -1
    batch = BatchLayout.build(
        query_lens=[TOKENS], seq_lens=[TOKENS], block_table=torch.arange(64, dtype=torch.int32)[None]
    )
    view = CacheView.of(blocks, plain(576, "bf16"))
    outs = [kernels.attend(queries, view, indices, batch, 0.05).out.clone() for _ in range(3)]
    return all(torch.equal(outs[0], out) for out in outs[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    until = time.monotonic() + parser.parse_args().seconds
    results = []
    while time.monotonic() < until:
        child = os.fork()
        if child == 0:
            code = 2
            try:
                code = 0 if same() else 1
            finally:
                os._exit(code)
        results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(f"{len(results)} fresh processes: {results.count(1)} differ in the first attend, {results.count(2)} broke")
    raise SystemExit(any(results))


if __name__ == "__main__":
    main()
