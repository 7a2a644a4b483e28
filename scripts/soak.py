"""Soak: random traffic against one long-lived vLLM, every finished request compared with a run of its own.

Prompts of 1 to 3,000 tokens with index_topk 64 arrive in bursts, share prefixes, are cut into chunks, are sampled or
greedy, are aborted, and are preempted because the cache is small. A second engine in another process, with no company,
no prefix cache and the whole prompt in one step, gives what is right. Prints counts; exits 1 on a difference.

    python scripts/soak.py --minutes 30 --seed 1
    python scripts/soak.py --minutes 1 --broken stale-gather     must exit 1

The last requests are a control: with a wrong selection in the engine they must differ, or nothing was proved.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCE = 1e-5
"""Of a logprob: the sampler's softmax changes its last bits with the number of rows. See ``fix_product_shapes``."""
CONTROL, CONTROL_REQUESTS = "last-k", 6
INDEX_TOPK, BLOCK, VOCABULARY = 64, 16, 512
MAX_TOKENS = 128
TILE = 32
AT_ONCE = 12
BACKLOG = 32  # requests that wait for their one-shot run; then none arrive until most of them had it
REMEMBERED = 6  # prompts whose beginnings later ones may have
_CACHE_BYTES = 64 << 20
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "SPARSE_MLA_VLLM": "always",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request; ``seed``: of its sampling, None for greedy; ``abort_after``: engine steps, None for never."""

    name: str
    ids: list[int]
    tokens: int
    seed: int | None
    abort_after: int | None

    def sampling(self) -> Any:
        """The engine's sampling parameters."""
        from vllm import SamplingParams

        heat = 0.0 if self.seed is None else 0.8
        return SamplingParams(
            max_tokens=self.tokens, temperature=heat, seed=self.seed, ignore_eos=True, detokenize=False, logprobs=2
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Token ids, the logprob of each, and by how much the best candidate of each step beats the next."""

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """What an engine returned."""
        done = output.outputs[0]
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in done.logprobs]
        return cls(
            tokens=list(done.token_ids),
            logprobs=[step[token].logprob for token, step in zip(done.token_ids, done.logprobs, strict=True)],
            gaps=[first - second for first, second, *_ in best],
        )


@dataclass
class Traffic:
    """Draws requests: lengths of every magnitude, and prompts that begin as recent ones or go on from their answers."""

    source: random.Random
    longest: int
    shortest: int = 1
    known: list[list[int]] = field(default_factory=lambda: [[]])
    drawn: int = 0

    def _between(self, least: int, most: int) -> int:
        """A whole number, every magnitude as likely as any other."""
        return round(math.exp(self.source.uniform(math.log(least), math.log(most))))

    def ids(self, length: int) -> list[int]:
        """Random token ids."""
        return [self.source.randrange(2, VOCABULARY) for _ in range(length)]

    def request(self) -> Request:
        """The next one."""
        self.drawn += 1
        chance, source = self.source.random, self.source
        length = self._between(self.shortest, self.longest)
        shared = source.choice(self.known) if chance() < 0.7 else []
        cut = source.randint(0, len(shared)) if chance() < 0.5 else len(shared)
        ids = (shared[:cut] + self.ids(length))[: max(length, cut)][: self.longest]
        self._remember(ids)
        return Request(
            name=str(self.drawn),
            ids=ids,
            tokens=self._between(1, MAX_TOKENS),
            seed=source.randrange(1 << 30) if chance() < 0.4 else None,
            abort_after=source.randint(1, 30) if chance() < 0.1 else None,
        )

    def go_on_from(self, request: Request, answer: Answer) -> None:
        """A later prompt may hold this request and its answer."""
        self._remember(request.ids + answer.tokens)

    def _remember(self, ids: list[int]) -> None:
        self.known = [*self.known[1 - REMEMBERED :], ids]


def fix_product_shapes() -> None:
    """Let the matrix products of vLLM's own layers always have one shape.

    On a CPU their fp32 bits change with the number of rows, and one changed bit can change the fp8 value of an index
    query and so a selection. With this, whatever still differs is not theirs, and nothing may.
    """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    linear, experts, pad = _custom_ops.onednn_mm, cpu_moe.cpu_fused_moe, torch.nn.functional.pad

    def tiled_linear(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, handler.k)
        tiles = pad(rows, (0, 0, 0, -len(rows) % TILE)).split(TILE)
        parts = [linear(handler, tile, bias) for tile in tiles]
        return torch.cat(parts)[: len(rows)].reshape(*x.shape[:-1], handler.n)

    def experts_by_token(
        out: torch.Tensor,
        rows: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        weights: torch.Tensor,
        ids: torch.Tensor,
        *rest: Any,
    ) -> None:
        for to, row, weight, chosen in zip(out.split(1), rows.split(1), weights.split(1), ids.split(1), strict=True):
            experts(to, row, w13, w2, w13_bias, w2_bias, weight, chosen, *rest)

    class Torch:
        """The module, for one file of vLLM, with a bmm of one shape."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def bmm(self, x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor) -> None:
            tiles = pad(x, (0, 0, 0, -x.shape[1] % TILE)).split(TILE, 1)
            out.copy_(torch.cat([torch.bmm(tile.contiguous(), y) for tile in tiles], 1)[:, : x.shape[1]])

    _custom_ops.onednn_mm, cpu_moe.cpu_fused_moe, mla_attention.torch = tiled_linear, experts_by_token, Torch()


def start_engine(model: str, **arguments: Any) -> Any:
    from vllm import LLM

    fix_product_shapes()
    common = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "block_size": BLOCK}
    return LLM(model, **common, kv_cache_memory_bytes=_CACHE_BYTES, **arguments)


class Live:
    """The engine under traffic."""

    def __init__(self, model: str, longest: int) -> None:
        length = longest + MAX_TOKENS
        self._llm = start_engine(
            model,
            max_model_len=length,
            max_num_batched_tokens=256,
            max_num_seqs=AT_ONCE,
            enable_prefix_caching=True,
            num_gpu_blocks_override=length // BLOCK + 8,  # the longest request and little more
            disable_log_stats=False,
        )
        self._steps, self._running = 0, dict[str, tuple[Request, int]]()
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Let it arrive."""
        self._llm.llm_engine.add_request(request.name, {"prompt_token_ids": request.ids}, request.sampling())
        self._running[request.name] = (request, self._steps)
        self.counts["requests"] += 1
        self.counts["sampled"] += request.seed is not None
        self.counts["prompt_tokens"] += len(request.ids)
        self.counts["longest_prompt"] = max(self.counts["longest_prompt"], len(request.ids))

    def step(self) -> list[tuple[Request, Answer]]:
        """One engine step, then the aborts that are due; returns what finished."""
        engine = self._llm.llm_engine
        finished = []
        for output in engine.step():
            if output.finished and output.request_id in self._running:
                request, _ = self._running.pop(output.request_id)
                finished.append((request, Answer.of(output)))
                self.counts["cached_tokens"] += output.num_cached_tokens
                self.counts["generated_tokens"] += len(finished[-1][1].tokens)
        self._steps += 1
        for name, (request, since) in list(self._running.items()):
            if request.abort_after is not None and self._steps - since >= request.abort_after:
                engine.abort_request([name])
                del self._running[name]
                self.counts["aborted"] += 1
        return finished

    def preemptions(self) -> int:
        """How often a request was preempted."""
        return sum(metric.value for metric in self._llm.get_metrics() if metric.name == "vllm:num_preemptions")


_judge: Any = None


def start_judge(model: str, longest: int) -> None:
    global _judge  # noqa: PLW0603 (one engine for the life of the judge's process)
    length = longest + 2 * MAX_TOKENS
    _judge = start_engine(
        model,
        max_model_len=length,
        max_num_batched_tokens=length,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )


def difference(request: Request, answer: Answer) -> tuple[str, float]:
    """What differs from a run of the request's own, empty if nothing does, and the largest difference of a logprob.

    Runs in the judge's process. Where another token was generated, a greedy one must be a near tie of the right one,
    and the tokens from there on are judged by the logprobs that they have as part of a prompt.
    """
    (output,) = _judge.generate([{"prompt_token_ids": request.ids}], request.sampling(), use_tqdm=False)
    right = Answer.of(output)
    pairs = zip(answer.tokens, right.tokens, strict=True)
    same = next((step for step, (mine, theirs) in enumerate(pairs) if mine != theirs), len(right.tokens))
    logprobs = right.logprobs
    if same < len(right.tokens):
        gap = right.gaps[same]
        if request.seed is None and not gap <= 2 * TOLERANCE:
            return f"token {same}: {answer.tokens[same]}, right is {right.tokens[same]} by {gap:.3g}", gap
        logprobs = logprobs[:same] + forced(request.ids + answer.tokens, len(right.tokens) - same)
    moves = [abs(mine - theirs) for mine, theirs in zip(answer.logprobs, logprobs, strict=True)]
    wrong = [step for step, move in enumerate(moves) if not move <= TOLERANCE]
    text = f"logprob of token {wrong[0]}: off by {moves[wrong[0]]:.3g}" if wrong else ""
    return text, max(moves)


def forced(ids: list[int], count: int) -> list[float]:
    """Logprobs of the last ``count`` ids as parts of a prompt."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0)
    (output,) = _judge.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return [step[token].logprob for token, step in zip(ids[-count:], output.prompt_logprobs[-count:], strict=True)]


class Soak:
    """The traffic, the engine under it and the judge."""

    def __init__(self, live: Live, judge: ProcessPoolExecutor, traffic: Traffic) -> None:
        self._live, self._judge, self._traffic = live, judge, traffic
        self._judged: dict[Future[tuple[str, float]], Request] = {}
        self._rate, self._waves = 1.0, True
        self.largest, self.different = 0.0, list[str]()
        self.compared = 0

    def run(self, *, until: float, requests: int) -> None:
        """Traffic until a time or a number of requests, then until all of it is answered and compared."""
        last, steps, said = self._traffic.drawn + requests, 0, time.monotonic()
        while (open_ := time.monotonic() < until and self._traffic.drawn < last) or len(self._live):
            self._waves = len(self._judged) < (BACKLOG if self._waves else BACKLOG // 4)
            if open_ and self._waves:
                self._arrive(steps, last)
            if not len(self._live):
                time.sleep(0.02)
            for request, answer in self._live.step() if len(self._live) else []:
                self._traffic.go_on_from(request, answer)
                self._judged[self._judge.submit(difference, request, answer)] = request
            self._collect(wait=False)
            steps += 1
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(
                    f"{self._live.counts['requests']} requests, {self.compared} compared", file=sys.stderr, flush=True
                )
        self._collect(wait=True)

    def _arrive(self, step: int, last: int) -> None:
        source = self._traffic.source
        if step % 40 == 0:
            self._rate = source.choice((0.03, 0.2, 0.6))
        if source.random() < self._rate and len(self._live) < 2 * AT_ONCE:
            for _ in range(min(source.choice((1, 1, 1, AT_ONCE)), last - self._traffic.drawn)):
                self._live.add(self._traffic.request())

    def _collect(self, *, wait: bool) -> None:
        for future in [one for one in self._judged if wait or one.done()]:
            request = self._judged.pop(future)
            text, move = future.result()
            self.compared += 1
            self.largest = max(self.largest, move)
            if text:
                how = "greedy" if request.seed is None else "sampled"
                self.different.append(f"request {request.name} ({len(request.ids)} tokens, {how}): {text}")


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    os.environ.update(_ENVIRONMENT)
    from sparse_mla.testing.faults import FAULTS
    from sparse_mla.testing.tiny_model import write_tiny_model

    faults = {fault.name: fault.inject for fault in FAULTS}
    if options.broken not in {None, *faults}:
        raise SystemExit(f"--broken: needs one of {', '.join(faults)}, got {options.broken}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), index_topk=INDEX_TOPK)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, spawn, start_judge, (folder, options.longest)) as judge:
            judge.submit(len, ())  # starts it while the other engine starts
            live = Live(folder, options.longest)
            soak = Soak(live, judge, Traffic(random.Random(options.seed), options.longest))
            with faults[options.broken]() if options.broken else nullcontext():
                soak.run(until=time.monotonic() + 60 * options.minutes, requests=options.requests)
            counts = {**live.counts, "preemptions": live.preemptions(), "compared": soak.compared}
            control = Soak(
                live, judge, Traffic(random.Random(f"control {options.seed}"), options.longest, 4 * INDEX_TOPK)
            )
            with faults[CONTROL]():
                control.run(until=math.inf, requests=CONTROL_REQUESTS)
    counts |= {
        "differences": len(soak.different),
        "largest_logprob_difference": soak.largest,
        f"control_{CONTROL}": f"{len(control.different)} of {control.compared} differ",
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(counts))
    for text in soak.different[:20]:
        print(text)
    return 1 if soak.different or not control.different else 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, default=1 << 30, help="stop after so many requests, if that is sooner")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--broken", metavar="FAULT", help="a name from sparse_mla.testing.faults: must exit 1")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
