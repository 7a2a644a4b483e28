"""Runs a list of engine jobs in one process, because importing vLLM costs more than starting a tiny engine.

A job is {"model", "engine": LLM arguments, "batches": [[prompt, ...], ...], "tokens", "logprobs", "env"}. Its result is either
{"error": "Type: text"} or {"batches": [[{"tokens", "prompt_logprobs", "cached"}, ...], ...], "modules": [...]}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 128 << 20,
}


def generate(llm, batch: list[list[int]], tokens: int, logprobs: bool) -> list[dict]:
    from vllm import SamplingParams

    wanted = 0 if logprobs else None
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=wanted
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
    return [
        {
            "tokens": output.outputs[0].token_ids,
            "prompt_logprobs": [next(iter(step.values())).logprob for step in (output.prompt_logprobs or [])[1:]],
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


def run(job: dict) -> dict:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ.update(job.get("env", {}))
    llm = None
    try:
        llm = LLM(job["model"], **{**ENGINE, **job.get("engine", {})})
        batches = [generate(llm, batch, job["tokens"], job.get("logprobs", True)) for batch in job["batches"]]
        return {
            "batches": batches,
            "modules": [name for name in sys.modules if name.startswith("sparse_mla")],
        }
    except Exception as error:  # noqa: BLE001 (the test judges it)
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        for name in job.get("env", {}):
            del os.environ[name]


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))
