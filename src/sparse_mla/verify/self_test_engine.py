"""The faults of ``--self-test`` that need an engine's layers and steps: put into a real vLLM, one process for all."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dims import MLADims
from ..testing.faults import KINDS
from ..testing.tiny_model import tiny_config, write_tiny_model
from .children import run_jobs
from .engine_judgement import Served, plan_checks
from .engine_trace import load
from .self_test import SHORT, Caught

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .progress import Steps
    from .report import Check

_LENGTHS = (SHORT, 608)
_CHUNKS = (256, 112)
_SCHEDULE = "FFS"  # the last layer reuses the indices of the one before it
_NEEDS = {
    "stale-shared-indices": "a layer that shares indices, two chunks",
    "step-under-too-small-a-key": "three chunks",
}
_LIMIT_SECONDS = 900.0


def engine_faults(steps: Steps) -> tuple[list[Caught], list[Check]]:
    """What the engine target's comparisons of chunk plans say about each fault; and what they say without any.

    Raises:
        NotCheckableError: the engine's process failed.
    """
    faults = [fault for fault in KINDS if fault.level == "engine"]
    with tempfile.TemporaryDirectory(prefix="sparse-mla-self-test-") as name:
        scratch = Path(name)
        write_tiny_model(scratch / "model", index_topk_pattern=_SCHEDULE)
        jobs = [_job(scratch, chunk, ["", *(fault.name for fault in faults)]) for chunk in _CHUNKS]
        steps.expect(len(jobs))
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "SPARSE_MLA_VLLM": "always",
            "SPARSE_MLA_INDEX_KEYS": "fp8",
        }
        results = run_jobs(
            "sparse_mla.verify.vllm_child",
            jobs,
            scratch / "engine",
            steps,
            environments=[environment],
            limit_seconds=_LIMIT_SECONDS,
        )
        found = {
            prompt["trace"]: Served(
                length=len(prompt["ids"]), chunk=chunk, answer=answer, trace=load(Path(prompt["trace"]))
            )
            for chunk, job, result in zip(_CHUNKS, jobs, results, strict=True)
            for prompt, answer in zip(job["prompts"], result["answers"], strict=True)
        }
        judged = {name: _judged(scratch, name, found) for name in ("", *(fault.name for fault in faults))}
        caught = [
            Caught(fault=fault, needs=_NEEDS[fault.name], short=judged[fault.name][0], long=judged[fault.name][1])
            for fault in faults
        ]
        return caught, [check for failed in judged[""] for check in failed]


def _trace(scratch: Path, chunk: int, fault: str, length: int) -> str:
    return str(scratch / f"trace-{chunk}-{fault or 'clean'}-{length}")


def _job(scratch: Path, chunk: int, faults: Sequence[str]) -> dict[str, Any]:
    config = tiny_config(index_topk_pattern=_SCHEDULE)
    prompts = []
    for fault in faults:
        for length in _LENGTHS:
            source = random.Random(f"self-test {length}")
            ids = [source.randrange(2, config["vocab_size"]) for _ in range(length)]
            trace = _trace(scratch, chunk, fault, length)
            # One token: what was decoded wrongly would differ in every later step, at every stage.
            prompts.append({"ids": ids, "tokens": 1, "trace": trace, "record": "", "fault": fault})
    engine = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": max(_LENGTHS) + 8,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return {
        "name": f"self-test: engine, chunks of {chunk}",
        "model": str(scratch / "model"),
        "indexers": _SCHEDULE.count("F"),
        "engine": engine,
        "environment": {"SPARSE_MLA_TRACE": prompts[0]["trace"]},
        "prompts": prompts,
    }


def _judged(scratch: Path, fault: str, found: dict[str, Served]) -> list[list[Check]]:
    """What fails on the short prompt, and on the long one."""
    dims = MLADims.from_config(tiny_config(index_topk_pattern=_SCHEDULE))
    groups = [[found[_trace(scratch, chunk, fault, length)] for chunk in _CHUNKS] for length in _LENGTHS]
    return [_failures(group, dims) for group in groups]


def _failures(group: list[Served], dims: MLADims) -> list[Check]:
    """The comparisons of two chunk plans that fail, in the order in which a fault travels: layer by layer."""
    failed = [check for check in plan_checks(group, dims) if not check.ok and check.id.endswith(".plans")]
    return sorted(failed, key=lambda check: int((re.findall(r"layers\.(\d+)\.", check.detail) or [1 << 20])[0]))
