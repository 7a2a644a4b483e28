"""What a failure follows: length, position, length modulo, concurrency, cache state or the number of prefill chunks.

Asks what tells these apart; ``verdicts`` says what the answers mean. A broken server can be right by luck (a fault that
spares most facts of a prompt often is), so a pass that a verdict rests on is asked again with other facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .outcome import Probe, StoppedError
from .sweep import try_out
from .verdicts import (
    Edge,
    Verdict,
    cache_verdict,
    compare_edges,
    concurrency_verdict,
    counts,
    intermittent,
    modulo_verdict,
    nth,
    ordinal,
    position_verdict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .session import Session
    from .sweep import Trial

_NEAR = 3
_ENOUGH_NEIGHBOURS = 2
_PIECES = (2, 3, 4, 6, 8)


class Localiser:
    """Asks what tells the explanations apart. ``trials`` are those of the sweep; ``baseline`` is a length that passed."""

    def __init__(
        self,
        session: Session,
        trials: Sequence[Trial],
        *,
        baseline: int,
        index_topk: int,
        chunk_tokens: Sequence[int | None],
        resolution: int,
        least: float,
    ) -> None:
        self._session, self._trials, self._baseline = session, list(trials), baseline
        self._index_topk, self._chunks = index_topk, tuple(chunk_tokens)
        self._resolution, self._least = resolution, least
        self.edge: Edge | None = None
        self.second_edge: Edge | None = None
        self.verdicts: list[Verdict] = []

    def localise(self) -> None:
        """Fill ``verdicts`` (and ``edge``), one by one, so that an interrupted run keeps what it has."""
        self._against_cold()
        failing = self._cold(lambda trial: trial.fails)
        if failing:
            self._with_length(failing[0])
        for trial in self._trials:
            if trial.intermittent:
                self.verdicts.append(intermittent(trial))

    def _cold(self, wanted: Callable[[Trial], bool]) -> list[int]:
        return sorted(t.probe.length for t in self._trials if t.probe.state == "cold" and wanted(t))

    def _trial(self, length: int) -> Trial:
        """A cold prompt of this length; what passes has passed each attempt."""
        probe = Probe(state="cold", length=length)
        known = next((trial for trial in self._trials if trial.probe == probe), None)
        if known and not known.ok:
            return known
        trial = try_out(self._session, probe, self._least, doubt_success=True)
        self._trials = [one for one in self._trials if one is not known] + [trial]
        return trial

    def _fails(self, length: int, server: int = 0, *, doubt_success: bool = False) -> bool:
        """Whether facts are lost: in one attempt, or in any where success is doubted."""
        probe = Probe(state="cold", length=length, server=server)
        outcome = self._session.ask(probe)
        if not outcome.answered:
            raise StoppedError(
                f"no answer while the failure was localised: {probe.title}: {outcome.failure}, {outcome.detail}"
            )
        if not outcome.passes(self._least):
            return True
        return doubt_success and not try_out(self._session, probe, self._least, doubt_success=True).ok

    def _against_cold(self) -> None:
        """Failures in other states whose lengths pass when sent alone and cold."""
        failing = [trial for trial in self._trials if trial.fails and trial.probe.state != "cold"]
        neighbours = [trial for trial in failing if trial.probe.state == "beside"]
        failing = [trial for trial in failing if trial not in neighbours[_ENOUGH_NEIGHBOURS:]]
        pairs = [(trial, self._trial(trial.probe.length)) for trial in failing]
        # A length that fails cold as well says nothing about the other state.
        pairs = [(trial, alone) for trial, alone in pairs if alone.ok]
        together = [pair for pair in pairs if pair[0].probe.state in {"concurrent", "beside"}]
        cached = [pair for pair in pairs if pair not in together]
        if together:
            self.verdicts.append(concurrency_verdict(together))
        if cached:
            self.verdicts.append(cache_verdict(cached))

    def _with_length(self, first: int) -> None:
        trial = self._trial(first)
        position = position_verdict(trial, self._index_topk)
        self.verdicts.append(position)
        if position.id == "endpoint.last-topk":
            return
        near = {length: length == first or self._fails(length, doubt_success=True) for length in self._near(first)}
        modulo = modulo_verdict(near)
        if modulo:
            self.verdicts.append(modulo)
            return
        self.edge = self._bisect(
            self._longest_passing(first, near), min(length for length, lost in near.items() if lost)
        )
        self.verdicts.append(self._chunks_or_length(first, self.edge))

    def _near(self, first: int) -> range:
        """Seven lengths around the failing one, or below it where the server's limit is close."""
        start = min(first - _NEAR, self._session.servers[0].room - 2 * _NEAR)
        return range(start, start + 2 * _NEAR + 1)

    def _longest_passing(self, first: int, near: Mapping[int, bool]) -> int:
        passing = [length for length in self._cold(lambda trial: trial.ok) if length < first]
        passing += [length for length, lost in near.items() if not lost and length < first]
        return max([self._baseline, *passing])

    def _bisect(self, passes: int, fails: int, server: int = 0) -> Edge:
        """One attempt a step; where the length that the edge rests on passed by luck, on below it."""
        while True:
            while fails - passes > self._resolution:
                middle = (passes + fails) // 2
                if self._fails(middle, server):
                    fails = middle
                else:
                    passes = middle
            if passes == self._baseline or not self._fails(passes, server, doubt_success=True):
                return Edge(passes=passes, fails=fails)
            passes, fails = self._baseline, passes

    def _chunks_or_length(self, first: int, edge: Edge) -> Verdict:
        if len(self._session.servers) > 1:
            return self._second_endpoint(first, edge)
        staged = self._staged(edge)
        if isinstance(staged, Verdict):
            return staged
        return Verdict(
            id="endpoint.length",
            statement=f"The failure begins {edge}{ordinal(edge, self._chunks[0], self._resolution)}. "
            "The number of prefill chunks is confounded with length.",
            evidence=(f"{edge.passes:,} tokens pass, {edge.fails:,} fail, cold and alone", staged),
            excludes=(
                "concurrency and cache state: every prompt was new and alone",
                f"length modulo: {self._near(first)[0]:,} to {self._near(first)[-1]:,} show no pattern",
            ),
            leaves_open=(
                "number of prefill chunks or length: give a second --endpoint of another chunk size to tell them apart",
            ),
        )

    def _staged(self, edge: Edge) -> Verdict | str:
        """Prompts sent in growing pieces through the prefix cache, so that each request prefills little; or why not.

        Where a failing length passes in pieces, and where a passing one fails in pieces, it is not the length.
        """
        for pieces in _PIECES:
            probe = Probe(state="staged", length=edge.fails, of=pieces)
            whole = try_out(self._session, probe, self._least, doubt_success=True)
            if not_cached := _not_cached(whole):
                return f"prompts staged through the prefix cache tell nothing: {not_cached}"
            if whole.ok:
                return self._fewer_chunks(edge, whole)
            short = try_out(self._session, Probe(state="staged", length=edge.passes, of=pieces), self._least)
            if short.fails:
                return self._more_pieces(edge, short)
        return f"sent in up to {_PIECES[-1]} pieces, {edge.passes:,} tokens pass and {edge.fails:,} fail as well"

    def _fewer_chunks(self, edge: Edge, trial: Trial) -> Verdict:
        where = ordinal(edge, self._chunks[0], self._resolution) or ": what one request prefills, or in how many chunks"
        return Verdict(
            id="endpoint.chunk-count",
            statement=f"The failure follows the prefill of one request, not the length. It begins {edge}{where}.",
            evidence=(
                f"{edge.fails:,} tokens fail at once and pass in {trial.probe.of} pieces behind cached prefixes",
                counts(trial),
            ),
            excludes=(
                f"total length: {edge.fails:,} tokens are answered rightly when sent in pieces",
                "the cached rows: what the pieces left behind reads rightly",
                "concurrency: one request at a time",
            ),
            leaves_open=(
                "number of chunks or tokens prefilled at once: a second --endpoint of another chunk size tells",
            ),
        )

    def _more_pieces(self, edge: Edge, trial: Trial) -> Verdict:
        pieces = trial.probe.of
        return Verdict(
            id="endpoint.chunk-count",
            statement=f"The failure follows the number of prefill pieces: from the {nth(pieces)} on, at a length that passes.",
            evidence=(f"{edge.passes:,} tokens pass at once and fail in {pieces} pieces", counts(trial)),
            excludes=(f"total length: {edge.passes:,} tokens pass at once", "concurrency: one request at a time"),
            leaves_open=("cached prefixes as such, unless the repeated and shared-prefix probes pass",),
        )

    def _second_endpoint(self, first: int, edge: Edge) -> Verdict:
        room = self._session.servers[1].room
        lengths = sorted({first, *(length for length in self._cold(lambda _: True) if first < length <= room)})
        if first > room:
            raise StoppedError(
                f"the second endpoint takes {room:,} tokens, too few to compare: {first:,} fail on the first"
            )
        passed = self._baseline
        for length in lengths:
            if self._fails(length, server=1, doubt_success=length == lengths[-1]):
                self.second_edge = self._bisect(passed, length, server=1)
                return compare_edges(edge, self.second_edge, self._chunks, self._resolution)
            passed = length
        chunk = self._chunks[1]
        reached = f" ({-(-passed // chunk)} chunks of {chunk:,})" if chunk else ""
        return Verdict(
            id="endpoint.chunk-count" if chunk else "endpoint.server",
            statement=f"The failure begins {edge}{ordinal(edge, self._chunks[0], self._resolution)}; the second endpoint, of another chunk size, "
            "does not fail at any length asked.",
            evidence=(f"the second endpoint keeps all facts up to {passed:,} tokens{reached}",),
            excludes=(f"total length as such: {edge.fails:,} tokens can be served", "the model's own recall"),
            leaves_open=("anything but chunk size in which the two servers differ",),
        )


def _not_cached(trial: Trial) -> str:
    """Why a staged prompt proves nothing, or empty."""
    outcome = trial.outcomes[0]
    if not outcome.answered:
        return f"no answer, {outcome.failure}"
    if outcome.cached_tokens is None:
        return "the server does not tell what it cached"
    share = 1 - 1 / trial.probe.of
    if outcome.cached_tokens < outcome.prompt_tokens * share * 3 // 4:
        return f"the server cached only {outcome.cached_tokens:,} of {outcome.prompt_tokens:,} tokens"
    return ""
