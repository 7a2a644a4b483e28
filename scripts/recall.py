"""Recall of the retrieval model by length and depth of the fact: prints the rows of docs/retrieval-model.md.

Runs it in vLLM with this package's plugin (`--engine vllm`) or in stock Transformers, chunk by chunk
(`--engine transformers`). `--selection last` and `--selection dense` are the controls: only the last `index_topk`
tokens, and every token. Recall is exact: all value tokens, the full stop and the end token.

    python scripts/recall.py --lengths 20000 40000 --selection sparse
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparse_mla.testing.planted import ANSWER_TOKENS, Planted, plant, recalled
from sparse_mla.testing.retrieval import write_retrieval_model

Answer = Callable[[Planted], list[list[int]]]


def main() -> None:
    options = parse_options()
    depths = [step / (options.depths - 1) for step in range(options.depths)]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    topk = 1 << 17 if options.selection == "dense" else options.index_topk
    with tempfile.TemporaryDirectory() as folder:
        write_retrieval_model(Path(folder), seed=options.seed, index_topk=min(topk, max(options.lengths) + 64))
        build = vllm_answers if options.engine == "vllm" else transformers_answers
        answer = build(folder, options)
        for length in options.lengths:
            started = time.monotonic()
            planted = plant(length, depths, seed=options.seed)
            hits = recalled(planted.facts, answer(planted))
            row = {
                "length": length,
                "recall": round(sum(hits) / len(hits), 3),
                "hits": "".join("#" if hit else "." for hit in hits),
                "selection": options.selection,
                "index_topk": options.index_topk,
                "engine": options.engine,
                "dtype": options.dtype,
                "seconds": round(time.monotonic() - started),
            }
            print(json.dumps(row), flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[20_000, 40_000, 60_000, 80_000, 100_000])
    parser.add_argument("--depths", type=int, default=21, help="facts in a prompt, evenly spread, first to last token")
    parser.add_argument("--selection", choices=("sparse", "last", "dense"), default="sparse")
    parser.add_argument("--index-topk", type=int, default=512)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk", type=int, default=2048, help="most tokens of one prefill step")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def vllm_answers(folder: str, options: argparse.Namespace) -> Answer:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "SPARSE_MLA_VLLM": "always"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=options.dtype,
        max_model_len=max(options.lengths) + 64,
        max_num_batched_tokens=options.chunk,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 30,  # one prompt of 131,072 tokens in fp32
        enforce_eager=True,
        enable_prefix_caching=True,  # the questions share the prompt: it is read once
    )
    if options.selection == "last":
        select_last_only()  # after the start-up comparison with the reference, which would refuse to serve this
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0)

    def answer(planted: Planted) -> list[list[int]]:
        prompts = [{"prompt_token_ids": planted.prompt(fact)} for fact in planted.facts]
        done = engine.generate(prompts[:1], sampling, use_tqdm=False)
        done += engine.generate(prompts[1:], sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in done]

    return answer


def select_last_only() -> None:
    """The control: instead of the best, the last ``index_topk`` tokens that a query sees."""
    from sparse_mla.attention import SparseMLA

    def select(self, index_q, index_weights, view, batch, out=None, lens=None):  # noqa: ANN001, ANN202, ARG001
        topk = self.plan.problem.dims.index_topk
        visible = batch.visible_lens[:, None]
        found = (visible - topk).clamp(min=0) + torch.arange(topk, dtype=torch.int32, device=visible.device)
        found = torch.where(found < visible, found, -1)
        return found if out is None else out.copy_(found)

    SparseMLA.select = select


def transformers_answers(folder: str, options: argparse.Namespace) -> Answer:
    from transformers import AutoModelForCausalLM
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    if options.selection == "last":

        def last(self, hidden, query, embeddings, mask, positions, past_key_values):  # noqa: ANN001, ANN202, ARG001
            seen = torch.arange(mask.shape[-1] - hidden.shape[1], mask.shape[-1])
            return (seen[:, None] - torch.arange(self.index_topk)).clamp(min=0)[None]

        GlmMoeDsaIndexer.forward = last

    def answer(planted: Planted) -> list[list[int]]:
        with torch.inference_mode():
            cache = None
            tokens = torch.tensor([planted.tokens])
            for start in range(0, tokens.shape[1], options.chunk):
                piece = tokens[:, start : start + options.chunk]
                cache = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
            return [continued(model, cache, fact.question) for fact in planted.facts]

    return answer


def continued(model: torch.nn.Module, cache: object, question: tuple[int, ...]) -> list[int]:
    """Greedy answer to one question; the cache is cut back to the prompt afterwards."""
    length = cache.get_seq_length()
    pending, said = list(question), []
    while len(said) < ANSWER_TOKENS:
        logits = model(torch.tensor([pending]), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        pending = [int(logits[0, -1].argmax())]
        said += pending
    cache.crop(length - cache.get_seq_length())
    return said


if __name__ == "__main__":
    main()
