"""Runs a list of engine jobs in one process, because importing vLLM costs more than starting a tiny engine.

A job is {"model", "engine": LLM arguments, "batches": [[prompt, ...], ...], "tokens", "logprobs", "env", "seeds": of each
batch, None for greedy, "stale": the number of a batch that has the fault}. Its result is either {"error": "Type: text"} or
{"batches": [[{"tokens", "logprobs", "prompt_logprobs", "cached"}, ...], ...], "preemptions", "modules"}. With "record" or
"transformers" it is a job of one of verify's own children.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import contextmanager, nullcontext
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


def generate(llm, batch: list[list[int]], tokens: int, logprobs: bool, seed: int | None) -> list[dict]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens,
        temperature=0.0 if seed is None else 0.8,
        seed=seed,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=0 if logprobs else None,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)
    return [
        {
            "tokens": output.outputs[0].token_ids,
            "logprobs": chosen(output.outputs[0].logprobs),
            "prompt_logprobs": chosen((output.prompt_logprobs or [])[1:]),
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


def chosen(steps: list[dict]) -> list[float]:
    return [next(iter(step.values())).logprob for step in steps]


@contextmanager
def stale_indices():
    """A fault: layers without an indexer read the indices of the step before."""
    from sparse_mla.integrations.vllm.impl import SparseMLAImpl
    from sparse_mla.testing.faults import patched

    right, last = SparseMLAImpl.forward_mqa, {}

    def forward_mqa(self, q, cache, metadata, layer):
        if self._indexer is not None:
            return right(self, q, cache, metadata, layer)
        buffer = self.topk_indices_buffer
        fresh = buffer.clone()
        buffer.copy_(last.get(layer.layer_name, fresh))
        last[layer.layer_name] = fresh
        answer = right(self, q, cache, metadata, layer)
        buffer.copy_(fresh)
        return answer

    with patched(SparseMLAImpl, "forward_mqa", forward_mqa):
        yield


def serve(job: dict) -> dict:
    from vllm import LLM

    llm = LLM(job["model"], **{**ENGINE, **job.get("engine", {})})
    seeds = job.get("seeds") or [None] * len(job["batches"])
    batches = []
    for number, (batch, seed) in enumerate(zip(job["batches"], seeds, strict=True)):
        with stale_indices() if job.get("stale") == number else nullcontext():
            batches.append(generate(llm, batch, job["tokens"], job.get("logprobs", True), seed))
    counted = job.get("engine", {}).get("disable_log_stats") is False
    metrics = {metric.name: metric for metric in (llm.get_metrics() if counted else ())}
    return {
        "batches": batches,
        "preemptions": metrics["vllm:num_preemptions"].value if counted else None,
        "modules": [name for name in sys.modules if name.startswith("sparse_mla")],
    }


def record(job: dict) -> dict:
    from sparse_mla.verify import vllm_child

    return vllm_child.run({**job, "engine": {**ENGINE, **job["engine"]}})


def by_transformers(job: dict) -> dict:
    from sparse_mla.verify import transformers_child

    return transformers_child.run(job)


def run(job: dict) -> dict:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ.update(job.get("env", {}))
    gc.freeze()  # what imports made is never garbage, and vLLM collects nine times for each engine
    try:
        if "record" in job:
            return record(job["record"])
        return by_transformers(job["transformers"]) if "transformers" in job else serve(job)
    except Exception as error:  # noqa: BLE001 (the test judges it)
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
        for name in job.get("env", {}):
            del os.environ[name]


if __name__ == "__main__":
    if os.environ.get("ONE_SHAPE"):
        sys.path.append(str(Path(__file__).parents[3] / "scripts"))
        from soak import fix_product_shapes

        fix_product_shapes()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))
