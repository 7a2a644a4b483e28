"""The child process with a real vLLM: ``python -m sparse_mla.verify.vllm_child FOLDER``. See ``children`` and ``engine``.

The engine runs inside this process, so that what its operators are asked can be recorded and wrong selections put in.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..attention import SparseMLA
from ..reference.write import decode_rows
from ..testing.faults import FAULTS, patched
from ..testing.inputs import slots_for
from .children import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..batch import BatchLayout
    from ..cache import CacheView

_FAULTS = {fault.name: fault for fault in FAULTS}


class Recorder:
    """What the select stage of each layer was asked and answered, for one request at a time.

    Attributes:
        described: the plan of the operators that served, as JSON values; None until one did.
    """

    def __init__(self) -> None:
        self.described: dict[str, Any] | None = None
        self._steps: list[dict[str, torch.Tensor]] = []

    @contextmanager
    def watching(self, *, keep: bool) -> Iterator[None]:
        """Record every call of ``SparseMLA.select``; keep its tensors if asked to."""
        native = SparseMLA.select

        def select(
            operator: SparseMLA,
            index_q: torch.Tensor,
            index_weights: torch.Tensor,
            view: CacheView,
            batch: BatchLayout,
            *rest: Any,
            **named: Any,
        ) -> torch.Tensor:
            indices = native(operator, index_q, index_weights, view, batch, *rest, **named)
            self.described = operator.plan.describe()
            if keep and batch.num_requests == 1 and batch.num_tokens:
                self._steps.append(_asked(index_q, index_weights, view, batch, indices))
            return indices

        self._steps.clear()
        with patched(SparseMLA, "select", select):
            yield

    def save(self, file: Path, indexers: int, tokens: int) -> None:
        """Write the first ``tokens`` rows of each layer with an indexer: ``layer.field`` tensors, safetensors."""
        from safetensors.torch import save_file

        layers = [self._steps[layer::indexers] for layer in range(indexers)]
        tensors = {
            f"{layer}.{field}": torch.cat([step[field] for step in steps])[:tokens].contiguous()
            for layer, steps in enumerate(layers)
            for field in steps[0]
        }
        save_file(tensors, file)


def _asked(
    index_q: torch.Tensor, index_weights: torch.Tensor, view: CacheView, batch: BatchLayout, indices: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Queries, weights and answer of a step, and the keys that it wrote, decoded by the reference from the cache."""
    stop, count = batch.seq_lens[0], batch.query_lens[0]
    slots = slots_for(batch.block_table[0].cpu(), view.block_size, stop - count, stop)
    keys, scale = decode_rows(view, slots.tolist())
    return {
        "index_q": index_q.float().cpu(),
        "index_weights": index_weights.float().cpu(),
        "keys": keys,
        "scale": scale,
        "indices": indices.cpu().clone(),
    }


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, let it answer prompts one after the other, and take it down."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ.update(job["environment"])
    llm = None
    try:
        llm = LLM(job["model"], **job["engine"])
        return {"answers": [_answer(llm, prompt, job["indexers"]) for prompt in job["prompts"]]}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _answer(llm: Any, prompt: dict[str, Any], indexers: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=prompt["tokens"], temperature=0.0, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    os.environ["SPARSE_MLA_TRACE"] = prompt["trace"]
    recorder = Recorder()
    with ExitStack() as stack:
        if prompt["fault"]:
            stack.enter_context(_FAULTS[prompt["fault"]].inject())
        stack.enter_context(recorder.watching(keep=bool(prompt["record"])))
        (output,) = llm.generate([{"prompt_token_ids": prompt["ids"]}], params, use_tqdm=False)
    if prompt["record"]:
        recorder.save(Path(prompt["record"]), indexers, len(prompt["ids"]))
    told = [next(iter(step.values())) for step in output.prompt_logprobs[1:]]
    return {
        "tokens": list(output.outputs[0].token_ids),
        "logprobs": [token.logprob for token in told],
        "ranks": [token.rank for token in told],
        "plan": recorder.described,
    }


if __name__ == "__main__":
    serve(run, Path(sys.argv[1]))
