"""The worst configuration of each kernel: many heads, fp8 keys under bf16 queries, several requests in a tile, lse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from cross import Launch, record

from sparse_mla.backends.triton.attend import Attend
from sparse_mla.backends.triton.select import Select
from sparse_mla.backends.triton.write import Write
from sparse_mla.testing.geometries import GLM_TP4


def worst_launches(device) -> dict[str, Launch]:
    """By name, for 64 index heads; attend for 16 attention heads, and for 64 in fast and in strict mode."""
    found: dict[str, Launch] = {}
    for heads, strict, kernels in ((64, False, (Write, Select, Attend)), (64, True, (Attend,)), (16, False, (Attend,))):
        geometry = replace(GLM_TP4, dims=replace(GLM_TP4.dims, num_heads=heads, index_n_heads=64))
        problem = geometry.problem(
            max_num_tokens=8192, max_num_requests=256, max_model_len=131072, deterministic=strict
        )
        for kernel in kernels:
            for launch in record(partial(kernel(problem, device).warm_up, torch.device("cpu"))):
                constants = dict(launch.constants)
                if constants.get("LSE", True):
                    found.setdefault(_named(launch.name, constants), launch)
    return found


def _named(name: str, constants: dict) -> str:
    if name == "attend_rows":
        kind = "split" if constants["SPLIT"] else "looped" if constants["PARTS"] > 1 else "whole"
        return f"{name}, tiles of {constants['HEAD_TILE']} heads, {kind}, {constants['STAGES']} stages"
    if name.startswith("score_"):
        return f"{name}, {'sample' if constants['STRIDE'] else 'keep'}, {constants['KEYS']} keys"
    return name
