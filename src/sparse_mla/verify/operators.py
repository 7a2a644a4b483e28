"""The operator target: long prompts under several chunk plans on real operators, by hash and against the reference."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .. import envs
from ..cache import fp8_ds_mla, index_fp8, plain
from ..device import Device, probe
from ..errors import BackendRejectedError
from ..plan import make_plan
from ..problem import Problem
from ..resolve import AUTO
from ..testing.geometries import GLM_TP4
from ..testing.inputs import Prompt
from . import memory
from .case import BLOCK_SIZE, NEIGHBOUR, Case, Inputs, Lane
from .chunks import MARGIN, chunk_plans, query_rows
from .judgement import judge
from .oracle import Oracle, judge_writes
from .report import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..cache import CacheFormat
    from ..dims import MLADims
    from ..plan import Plan
    from .chunks import ChunkPlan, Rows
    from .judgement import CaseResult
    from .progress import Steps

LENGTHS = (20_000, 40_000, 60_000, 80_000, 100_000)
CHUNK_TOKENS = (8_192, 12_288, 21_504)
_DTYPE = "bf16"
_DECODED = 4
_SLACK_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorOptions:
    """What to run. The defaults are the full run on a CPU.

    Attributes:
        lengths: prompt lengths, in the order in which they run.
        chunk_tokens: sizes of the uniform chunk plans.
        backend: as for ``make_plan``.
        complete_up_to: prompts of up to so many tokens: look at every query row instead of boundary and drawn ones.
        pages, sampled, referenced: see ``chunks.query_rows``.
        exact_kinds: kinds of inputs whose indices must equal the reference's; run at the first length.
        block_stride: bytes from one block of a cache to the next, rounded down to whole blocks; 0: side by side.
    """

    lengths: Sequence[int] = LENGTHS
    chunk_tokens: Sequence[int] = CHUNK_TOKENS
    dims: MLADims = GLM_TP4.dims
    backend: str | None = None
    device: str = "cpu"
    seed: int = 0
    complete_up_to: int = 0
    pages: int = 32
    sampled: int = 256
    referenced: int = 12
    exact_kinds: Sequence[str] = ("integer", "tied")
    block_stride: int = 0


def quick(options: OperatorOptions) -> OperatorOptions:
    """The same checks on less: the first length, and fewer drawn rows."""
    return replace(options, lengths=options.lengths[:1], pages=8, sampled=64, referenced=4, exact_kinds=("tied",))


class Operators:
    """What one run of verify judges: a geometry on a device, and the operators that serve it."""

    def __init__(self, options: OperatorOptions) -> None:
        self.options = options
        self.facts: Device = probe(options.device)
        self.device = torch.device(options.device)
        dims, encoding = options.dims, self.facts.fp8 or "fp8"
        self.index: CacheFormat = index_fp8(dims.index_head_dim, encoding=encoding)
        self.latents: dict[str, CacheFormat] = {"bf16": plain(dims.head_dim, _DTYPE)}
        if (dims.kv_lora_rank, dims.qk_rope_head_dim) == (512, 64):
            self.latents["fp8_ds_mla"] = fp8_ds_mla(encoding=encoding)
        if options.backend not in (None, AUTO):
            self.latents = self._served() or self.latents
        self.longest = max(options.lengths) + _DECODED
        self.plans = self._plans(self.longest)

    def _served(self) -> dict[str, CacheFormat]:
        """The latent formats that the backend asked for can serve; the report names them."""
        served = {}
        for name, latent in self.latents.items():
            try:
                make_plan(self._problem(latent, 1), self.facts, backend=self.options.backend)
            except BackendRejectedError:
                continue
            served[name] = latent
        return served

    def _plans(self, total: int) -> dict[str, Plan]:
        """One plan for each latent format, for prompts of up to ``total`` tokens beside a short neighbour."""
        backend = self.options.backend
        return {
            name: make_plan(self._problem(latent, total), self.facts, backend=backend)
            for name, latent in self.latents.items()
        }

    def _problem(self, latent: CacheFormat, total: int) -> Problem:
        return Problem(
            dims=self.options.dims,
            dtype=_DTYPE,
            latent=latent,
            index=self.index,
            latent_block_size=BLOCK_SIZE,
            index_block_size=BLOCK_SIZE,
            max_num_tokens=total + NEIGHBOUR,
            max_num_requests=2,
            max_model_len=max(total, NEIGHBOUR),
            deterministic=envs.get("SPARSE_MLA_DETERMINISTIC"),
        )

    @property
    def strict(self) -> bool:
        """Decode is promised equal in bits to prefill."""
        return all(stage.mode == "strict" for plan in self.plans.values() for stage in (plan.select, plan.attend))

    def lane(self, total: int | None = None) -> Lane:
        """Fresh objects, planned for ``total`` tokens; None: for the longest prompt."""
        lane = Lane(self.plans if total is None else self._plans(total), self.device)
        if total is None:  # what runs: another backend, or in another mode, where warm-up found that it has to
            self.plans = {name: layer.plan for name, layer in lane.layers.items()}
        return lane

    def chunked(self, length: int) -> tuple[tuple[ChunkPlan, ...], Rows]:
        """The chunk plans of a length, and the rows to look at."""
        options = self.options
        plans = chunk_plans(length, _DECODED, options.chunk_tokens, seed=options.seed, strict=self.strict)
        rows = query_rows(
            plans,
            topk=options.dims.index_topk,
            block_size=BLOCK_SIZE,
            seed=options.seed,
            pages=options.pages,
            sampled=options.sampled,
            referenced=options.referenced,
            complete=length <= options.complete_up_to,
            strict=self.strict,
        )
        return plans, rows

    def require_memory(self, length: int) -> None:
        """Refuse a length that does not fit, before it takes anything.

        Raises:
            NotCheckableError: too little memory.
        """
        dims, total = self.options.dims, length + _DECODED
        rows = total if length <= self.options.complete_up_to else min(total, 1 << 13)
        cached = self.index.row_bytes + sum(latent.row_bytes for latent in self.latents.values())
        written = 2 * (dims.head_dim + dims.index_head_dim)
        query = 3 * dims.index_n_heads * dims.index_head_dim + 6 * dims.num_heads * dims.head_dim + 8 * dims.index_topk
        scratch = max(plan.scratch_bytes for plan in self._plans(total).values())
        reference = total * (8 * dims.index_head_dim + 64)
        held = total * (cached + written) + rows * query + 2 * scratch
        what = f"{length:,} tokens on {self.facts.arch}"
        if self.device.type == "cpu":
            memory.require(what, held + reference + _SLACK_BYTES, memory.free_host_bytes())
        else:
            memory.require(what, held, memory.free_device_bytes(self.device))
            memory.require(what, total * written + rows * query + reference + _SLACK_BYTES, memory.free_host_bytes())

    def case(self, length: int, kind: str, long_lived: Lane, steps: Steps) -> CaseResult:
        """Compute and judge one length with one kind of inputs."""
        began, seed = time.monotonic(), self.options.seed
        name = f"{length:,} tokens, {kind}"
        self.require_memory(length)
        plans, rows = self.chunked(length)
        prompt = Prompt(dims=self.options.dims, length=length + _DECODED, seed=seed, kind=kind, dtype=_DTYPE)
        with steps.step(f"{name}: inputs"):
            inputs = Inputs.of(prompt, rows, self.index, self.device)
            latents = self.latents if kind == "normal" else {}  # the other kinds differ in their index keys alone
            stride = self.options.block_stride
            case = Case(self.options.dims, self.index, latents, inputs, rows, block_stride=stride)
        runs, writes = [], {}
        for number, plan in enumerate(plans):
            with steps.step(f"{name}: {plan.name} ({len(plan.ends)} calls)"):
                fresh = lambda: self.lane(prompt.length)  # noqa: E731
                runs.append(case.run(plan, long_lived, fresh, seed=seed * 1009 + number))
                writes[plan.name] = judge_writes(case, rows.reference[:: max(1, len(rows.reference) // 24)])
        with steps.step(f"{name}: reference ({len(rows.reference)} rows)"):
            verdicts = Oracle(case, exact=kind != "normal").judge(runs)
        scratch = max(plan.scratch_bytes for plan in self.plans.values())
        result = judge(name, case, runs, writes, verdicts, scratch_bytes=scratch, seconds=time.monotonic() - began)
        failed = sum(not check.ok for check in result.checks)
        found = f"{failed} of {len(result.checks)} checks failed" if failed else f"{len(result.checks)} checks passed"
        steps.say(f"{name}: {found}")
        return result


def verify_operators(options: OperatorOptions, steps: Steps) -> Report:
    """Run the operator target.

    Raises:
        UsageError: an unknown backend or device.
        BackendRejectedError: the backend asked for cannot serve this geometry here.
        NotCheckableError: too little memory.
    """
    began = time.monotonic()
    operators = Operators(options)
    operators.require_memory(max(options.lengths))
    jobs = [(options.lengths[0], kind) for kind in options.exact_kinds] + [
        (length, "normal") for length in options.lengths
    ]
    long_lived = operators.lane()
    steps.expect(sum(len(operators.chunked(length)[0]) + 2 for length, _ in jobs))
    results = [operators.case(length, kind, long_lived, steps) for length, kind in jobs]
    return Report(
        target="operators",
        facts=_facts(operators, results),
        cases=tuple(result.facts for result in results),
        checks=tuple(check for result in results for check in result.checks),
        proved=tuple(_proved(operators, results)),
        not_proved=tuple(_not_proved(operators, results)),
        seconds=time.monotonic() - began,
    )


def _facts(operators: Operators, results: Sequence[CaseResult]) -> dict[str, Any]:
    options, plan = operators.options, next(iter(operators.plans.values()))
    runs = [run for result in results for run in result.facts["plans"]]
    described = plan.describe()
    dims = options.dims
    return {
        "device": {"kind": operators.facts.kind, "arch": operators.facts.arch, "name": operators.facts.name},
        "torch": torch.__version__,
        "geometry": {
            "num_heads": dims.num_heads,
            "kv_lora_rank": dims.kv_lora_rank,
            "qk_rope_head_dim": dims.qk_rope_head_dim,
            "qk_nope_head_dim": dims.qk_nope_head_dim,
            "index_n_heads": dims.index_n_heads,
            "index_head_dim": dims.index_head_dim,
        },
        "index_topk": dims.index_topk,
        "index_cache": str(operators.index),
        "latent_caches": {name: str(latent) for name, latent in operators.latents.items()},
        "stages": described["stages"],
        "strict": operators.strict,
        "scratch": {
            "planned_bytes": max(each.scratch_bytes for each in operators.plans.values()),
            "touched_bytes": max(run["touched_scratch_bytes"] for run in runs),
        },
        "sparse_rows": sum(run["sparse_rows"] for run in runs),
        "nan_rows": sum(run["nan_rows"] for run in runs),
        "seed": options.seed,
        "lengths": list(options.lengths),
        "chunk_tokens": list(options.chunk_tokens),
    }


def _proved(operators: Operators, results: Sequence[CaseResult]) -> list[str]:
    """What the checks that passed amount to."""
    passed = [result for result in results if all(check.ok for check in result.checks)]
    lines = [
        f"{result.facts['case']}: {', '.join(result.facts['stages'])} equal in every bit over "
        f"{len(result.facts['plans'])} chunk plans, and {result.facts['rows']['reference']} rows equal to the reference"
        for result in passed
    ]
    sparse = sum(run["sparse_rows"] for result in passed for run in result.facts["plans"])
    if sparse:
        topk = operators.options.dims.index_topk
        lines.append(f"the sparse path: {sparse:,} query rows saw more than {topk:,} tokens and selected {topk:,}")
    if passed and operators.strict:
        lines.append("strict mode: decoded tokens equal in every bit to the same tokens in a prefill")
    return lines


def _not_proved(operators: Operators, results: Sequence[CaseResult]) -> list[str]:
    options, lines = operators.options, []
    if not any(run["sparse_rows"] for result in results for run in result.facts["plans"]):
        lines.append(f"the sparse path: no query row saw more than index_topk = {options.dims.index_topk:,} tokens")
    restricted = [len(rows.query) for _, rows in map(operators.chunked, options.lengths) if not rows.complete]
    if restricted:
        lines.append(
            f"query rows other than the up to {max(restricted):,} looked at in each case: within {MARGIN} of every chunk "
            f"boundary, of index_topk and of {options.pages} page boundaries, and {options.sampled} more, drawn from seed "
            f"{options.seed} (--all-rows looks at every one; caches are always written and compared in full)"
        )
    if not operators.strict:
        lines.append("fast mode: decode equal in bits to prefill, and calls of a few tokens")
    return lines
