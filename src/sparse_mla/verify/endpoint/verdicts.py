"""Verdicts, and how they follow from evidence: pure functions of lengths, trials and edges.

Each verdict says what its evidence excludes and what it leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .outcome import Outcome
    from .sweep import Trial

_LARGEST_MODULUS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """``id`` is stable: endpoint.length, .last-topk, .depth, .length-modulo, .concurrency, .cache-state, …"""

    id: str
    statement: str
    evidence: tuple[str, ...]
    excludes: tuple[str, ...]
    leaves_open: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """The failure begins above ``passes`` and at or below ``fails`` tokens."""

    passes: int
    fails: int

    def __str__(self) -> str:
        if self.fails - self.passes == 1:
            return f"exactly at {self.fails:,} tokens"
        return f"between {self.passes:,} and {self.fails:,} tokens"


def concurrency_verdict(pairs: Sequence[tuple[Trial, Trial]]) -> Verdict:
    """Trials that fail among other requests, each with the same length alone and cold, which passes."""
    return Verdict(
        id="endpoint.concurrency",
        statement="Facts are lost only when other requests run at the same time.",
        evidence=tuple(counts(trial) for pair in pairs for trial in pair),
        excludes=(_same_lengths(pairs), "cache state: every prompt was new"),
        leaves_open=("whether batching, memory pressure or preemption does it",),
    )


def cache_verdict(pairs: Sequence[tuple[Trial, Trial]]) -> Verdict:
    """Trials that fail where their prompt, or its first half, was sent before; each with the same length cold."""
    told = [trial.outcomes[0].cached_tokens for trial, _ in pairs]
    cached = "tokens from the cache, as told by the server: " + ", ".join(
        "?" if one is None else f"{one:,}" for one in told
    )
    return Verdict(
        id="endpoint.cache-state",
        statement="Facts are lost only when the prompt, or its first half, was sent before: reuse of cached prefixes.",
        evidence=(*(counts(trial) for pair in pairs for trial in pair), cached),
        excludes=(_same_lengths(pairs), "concurrency: one request at a time"),
        leaves_open=("whether cached rows are wrong, or prefill behind a cached prefix",),
    )


def _same_lengths(pairs: Sequence[tuple[Trial, Trial]]) -> str:
    lengths = ", ".join(f"{alone.probe.length:,}" for alone in dict.fromkeys(alone for _, alone in pairs))
    return f"total length and position: alone and cold all facts are recalled at {lengths} tokens"


def compare_edges(edge: Edge, other: Edge, chunks: Sequence[int | None], resolution: int) -> Verdict:
    """Where two servers of different chunk size begin to fail."""
    evidence = (
        f"first endpoint: the failure begins {edge}{ordinal(edge, chunks[0], resolution)}",
        f"second endpoint: the failure begins {other}{ordinal(other, chunks[1], resolution)}",
    )
    if abs(edge.fails - other.fails) <= 2 * resolution:
        return Verdict(
            id="endpoint.length",
            statement=f"The failure follows the length: it begins {edge} on both endpoints.",
            evidence=evidence,
            excludes=("number of prefill chunks: the chunk sizes differ, the lengths do not",),
            leaves_open=("a fault that both servers share",),
        )
    first, second = (chunk_of(one, chunk, resolution) for one, chunk in zip((edge, other), chunks, strict=True))
    if first is not None and first == second:
        return Verdict(
            id="endpoint.chunk-count",
            statement=f"The failure follows the number of prefill chunks: from the {nth(first)} chunk on, on both endpoints.",
            evidence=evidence,
            excludes=(
                "total length: the endpoints begin to fail at different lengths",
                "concurrency: one request at a time",
            ),
        )
    return Verdict(
        id="endpoint.server",
        statement="The endpoints begin to fail at different lengths: the failure follows the chunk size or another difference.",
        evidence=evidence,
        excludes=("total length as such",),
        leaves_open=("the number of chunks: give both sizes with --chunk-tokens",) if None in chunks else (),
    )


def chunk_of(edge: Edge, chunk: int | None, slack: int) -> int | None:
    """Number (from 1) of the prefill chunk that begins inside the edge, or at most ``slack`` tokens before; None if none does.

    The first tokens of a chunk may hold nothing but the question: a fault of that chunk shows a little later.
    """
    if not chunk:
        return None
    before = (edge.fails - 1) // chunk
    return before + 1 if before and edge.passes <= before * chunk + min(slack, chunk // 8) else None


def ordinal(edge: Edge, chunk: int | None, slack: int) -> str:
    """``, where the third chunk of 8,192 tokens begins`` where that is so."""
    number = chunk_of(edge, chunk, slack)
    if not (number and chunk):
        return ""
    where = "where" if edge.passes <= (number - 1) * chunk else "just after"
    return f", {where} the {nth(number)} chunk of {chunk:,} tokens begins"


def position_verdict(trial: Trial, index_topk: int) -> Verdict:
    """Which facts survive in a failing trial."""
    lost = [outcome for outcome in trial.outcomes if outcome.answered and not outcome.passes(trial.least)]
    inside = [fact[2] for outcome in lost for fact in outcome.facts if _in_tail(outcome, fact[1], index_topk)]
    outside = [fact[2] for outcome in lost for fact in outcome.facts if not _in_tail(outcome, fact[1], index_topk)]
    evidence = (
        counts(trial),
        f"last {index_topk:,} tokens: {sum(inside)} of {len(inside)}, before: {sum(outside)} of {len(outside)}",
    )
    length = trial.probe.length
    if inside and all(inside) and outside and not any(outside):
        return Verdict(
            id="endpoint.last-topk",
            statement=f"Only facts in the last {index_topk:,} tokens survive at {length:,} tokens: selection keeps the newest.",
            evidence=evidence,
            excludes=(
                "the length as such: the last facts are read at this length",
                "number of chunks, concurrency, cache state",
            ),
            leaves_open=("whether the indexer's scores are wrong, or the pick made from them",),
        )
    if not any(inside) and not any(outside):
        return Verdict(
            id="endpoint.garbled",
            statement=f"No fact survives at {length:,} tokens, at any depth: the whole answer is garbled.",
            evidence=evidence,
            excludes=("position of the facts: the last page is lost with the first",),
        )
    missing = sorted((start, label) for outcome in lost for label, start, found in outcome.facts if not found)
    depths = list(dict.fromkeys(label for _, label in missing))
    return Verdict(
        id="endpoint.depth",
        statement=f"Some facts survive at {length:,} tokens; lost at: {', '.join(depths)}.",
        evidence=evidence,
        excludes=("a wholly garbled answer", f"selection of the last {index_topk:,} tokens alone"),
        leaves_open=("a model that is weak by itself: compare with a server known to be good (--save, --against)",),
    )


def modulo_verdict(lost: Mapping[int, bool]) -> Verdict | None:
    """A verdict where neighbouring lengths fail and pass in turn; None where all fail, or all from one length on."""
    lengths = sorted(lost)
    pattern = [lost[length] for length in lengths]
    if pattern == sorted(pattern):
        return None
    evidence = (", ".join(f"{length:,} {'fails' if lost[length] else 'passes'}" for length in lengths),)
    excludes = ("total length: longer prompts pass", "number of chunks, concurrency, cache state, position")
    for modulus in range(2, _LARGEST_MODULUS + 1):
        bad = {length % modulus for length in lengths if lost[length]}
        if not any(length % modulus in bad for length in lengths if not lost[length]):
            rests = " or ".join(map(str, sorted(bad)))
            return Verdict(
                id="endpoint.length-modulo",
                statement=f"Prompts fail whose length is {rests} modulo {modulus}.",
                evidence=evidence,
                excludes=excludes,
                leaves_open=("where that begins: no length was bisected",),
            )
    return Verdict(
        id="endpoint.irregular",
        statement="Neighbouring lengths fail and pass without a pattern in the length.",
        evidence=evidence,
        excludes=excludes[:1],
        leaves_open=("a fault that comes and goes with something unseen, such as other users' load",),
    )


def intermittent(trial: Trial) -> Verdict:
    """Facts that are lost in some attempts only."""
    return Verdict(
        id="endpoint.intermittent",
        statement=f"{trial.probe.title}: facts are lost in {trial.failures} of {len(trial.outcomes)} attempts.",
        evidence=(counts(trial),),
        excludes=("a fault that follows length or state alone",),
        leaves_open=("a fault that comes and goes, or a model that is weak by itself (--min-recall, --against)",),
    )


def _in_tail(outcome: Outcome, start: int, index_topk: int) -> bool:
    return start >= outcome.prompt_tokens - index_topk


def counts(trial: Trial) -> str:
    """Facts recalled in each attempt."""
    shown = ", ".join(
        f"{outcome.recalled} of {len(outcome.facts)}" if outcome.answered else outcome.failure
        for outcome in trial.outcomes
    )
    return f"{trial.probe.title}: facts recalled: {shown}"


def nth(number: int) -> str:
    """3 -> ``third``."""
    return {1: "first", 2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}th")
