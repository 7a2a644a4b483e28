"""Lengths × states: which probes are asked, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UsageError
from .options import DEFAULT_LENGTHS
from .outcome import Probe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .outcome import Book, Outcome
    from .session import Session

ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A probe, asked again with other facts when it failed. ``outcomes`` are its attempts in order."""

    probe: Probe
    outcomes: tuple[Outcome, ...]
    least: float

    @property
    def failures(self) -> int:
        """Attempts that were answered and lost facts."""
        return sum(outcome.answered and not outcome.passes(self.least) for outcome in self.outcomes)

    @property
    def answered(self) -> bool:
        """Whether any attempt got an answer."""
        return any(outcome.answered for outcome in self.outcomes)

    @property
    def ok(self) -> bool:
        """Answered, and no attempt lost facts."""
        return self.answered and self.failures == 0

    @property
    def fails(self) -> bool:
        """At least two of three attempts lost facts, or the only one that was answered."""
        return 2 * self.failures > sum(outcome.answered for outcome in self.outcomes)

    @property
    def intermittent(self) -> bool:
        """Some attempts lost facts, but not most."""
        return self.failures > 0 and not self.fails


def lengths_to_ask(asked: tuple[int, ...] | None, limit: int | None, answer_tokens: int) -> tuple[int, ...]:
    """The lengths of the sweep, ascending, within the server's limit.

    Raises:
        UsageError: a length was asked for that the server says it does not take.
    """
    room = None if limit is None else limit - answer_tokens
    if asked is not None:
        if room is not None and max(asked) > room:
            needs = f"at most {room:,}: the server's limit of {limit:,} less {answer_tokens:,} for the answer"
            raise UsageError("--lengths", needs=needs, got=f"{max(asked):,}")
        return tuple(sorted(set(asked)))
    if room is None or room >= DEFAULT_LENGTHS[-1]:
        return DEFAULT_LENGTHS
    below = tuple(length for length in DEFAULT_LENGTHS if length < room * 9 // 10)
    return (*below, room) if below else (room // 2, room)


def planned(lengths: Iterable[int], *, index_topk: int, least: int, beside: int) -> list[Probe]:
    """Every probe of a run in which nothing fails, shortest first.

    A length of twice ``index_topk`` comes first: sparse already, and short. Prompts with a shared prefix and among
    others are 1 to 3 tokens shorter, so that faults that follow the length modulo 4 have no blind spot.
    """
    lengths = sorted(lengths)
    probes = []
    if least <= 2 * index_topk < lengths[0]:
        probes.append(Probe(state="cold", length=2 * index_topk))
    for number, length in enumerate(lengths):
        shorter = 1 + number % 3
        probes += [
            Probe(state="cold", length=length),
            Probe(state="repeat", length=length),
            Probe(state="prefix", length=length - shorter, of=length),
        ]
        if beside:
            probes.append(Probe(state="concurrent", length=length - 4 + shorter))
    return probes


def try_out(
    session: Session, probe: Probe, least: float, attempts: int = ATTEMPTS, *, doubt_success: bool = False
) -> Trial:
    """Ask a probe; where facts are lost, or if success is doubted, again with other facts: ``attempts`` in all."""
    outcomes = [session.ask(probe)]
    if outcomes[0].answered and (doubt_success or not outcomes[0].passes(least)):
        outcomes += [session.ask(again(probe, attempt)) for attempt in range(1, attempts)]
    return Trial(probe=probe, outcomes=tuple(outcomes), least=least)


def trial_of(probe: Probe, book: Book, least: float) -> Trial:
    """What a book holds of a probe, without asking anything."""
    attempts = [probe] if probe.state == "beside" else [again(probe, attempt) for attempt in range(ATTEMPTS)]
    outcomes = tuple(book.outcomes[one.key] for one in attempts if one.key in book.outcomes)
    return Trial(probe=probe, outcomes=outcomes, least=least)


def again(probe: Probe, attempt: int) -> Probe:
    """The same probe with other facts (of a repeated prompt: the same once more)."""
    return Probe(state=probe.state, length=probe.length, attempt=attempt, server=probe.server, of=probe.of)
