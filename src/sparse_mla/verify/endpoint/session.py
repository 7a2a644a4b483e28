"""Asks probes: composes the prompts, sends them, scores the answers, keeps the books.

It stops a run that has become pointless: out of budget, or a server that fails several requests in a row.
"""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .api import refused
from .outcome import Outcome, StoppedError
from .prompts import MOST_FACTS, Prompt, Recipe
from .transport import FailedExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .api import Answer, Api, Mode
    from .outcome import Book, Probe
    from .progress import Progress
    from .prompts import Composer
    from .style import Style

MOST_FAILURES = 3
BASELINE = "baseline"
_FEW_FACTS = 4
_ENDLESS = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """One endpoint, ready to be asked. ``limit`` is its context length in tokens."""

    api: Api
    mode: Mode
    composer: Composer
    limit: int | None
    answer_tokens: int

    @property
    def room(self) -> int:
        """Longest prompt that leaves room for an answer."""
        return _ENDLESS if self.limit is None else self.limit - self.answer_tokens


class Ledger:
    """Counts tokens against the budget: reserved before a request, corrected by the answer's own counts."""

    def __init__(self, budget: int | None) -> None:
        self._budget, self._lock = budget, threading.Lock()
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.requests = 0

    def reserve(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raises: StoppedError: the budget does not hold another request of this size."""
        with self._lock:
            total = self.prompt_tokens + self.completion_tokens + prompt_tokens + answer_tokens
            if self._budget is not None and total > self._budget:
                raise StoppedError(
                    f"--budget-tokens {self._budget:,} is used up: the next request may bring the total to {total:,}"
                )
            self.prompt_tokens += prompt_tokens
            self.completion_tokens += answer_tokens
            self.requests += 1

    def correct(self, reserved: tuple[int, int], answer: Answer) -> None:
        """Replace what was reserved by what the server counted."""
        with self._lock:
            self.cached_tokens += answer.cached_tokens or 0
            if answer.prompt_tokens is not None:
                self.prompt_tokens += answer.prompt_tokens - reserved[0]
            if answer.completion_tokens is not None:
                self.completion_tokens += answer.completion_tokens - reserved[1]


class Session:
    """Everything asked in one run. ``servers[0]`` is the one judged."""

    def __init__(
        self, servers: Sequence[Server], style: Style, book: Book, ledger: Ledger, progress: Progress, *, beside: int
    ) -> None:
        self.servers, self._style, self.book, self.ledger = tuple(servers), style, book, ledger
        self._progress, self._beside = progress, beside
        self._failures = 0

    def ask(self, probe: Probe) -> Outcome:
        """The outcome of a probe, asked now unless the book has its answer.

        Raises:
            StoppedError: see the module.
        """
        known = self.book.outcomes.get(probe.key)
        if known is not None and known.answered:
            self._progress.skip(probe)
            return known
        with self._progress.step(probe) as shown:
            outcome = self.attempt(probe)
            shown(outcome)
        self.book.keep(probe, outcome)
        self._failures = 0 if outcome.answered else self._failures + 1
        if self._failures >= MOST_FAILURES:
            raise StoppedError(
                f"{self._failures} requests in a row failed, the last with {outcome.failure}: {outcome.detail}"
            )
        return outcome

    def attempt(self, probe: Probe) -> Outcome:
        """Ask once, past the book; a failed exchange is an outcome too."""
        server = self.servers[probe.server]
        try:
            if probe.state == "concurrent":
                return self._among_others(probe)
            prompts = server.composer.prompts(recipe(probe))
            if probe.state == "staged":
                self._warm_up(server, prompts[0], probe.of)
            return self._answers(server, prompts)
        except FailedExchange as failed:
            return _no_answer(failed)

    def _answers(self, server: Server, prompts: Sequence[Prompt]) -> Outcome:
        return merged([self._one(server, prompt) for prompt in prompts])

    def _one(self, server: Server, prompt: Prompt) -> Outcome:
        answer = self._complete(server, prompt.content, prompt.length, server.answer_tokens)
        if answer.unfinished:
            raise FailedExchange("no-answer", "thinking used up all tokens. Raise --thinking-tokens")
        counted = answer.prompt_tokens
        if counted is not None and counted < prompt.length * 9 // 10:
            raise FailedExchange("truncated", f"the server counted {counted:,} of {prompt.length:,} tokens")
        return scored(self._style, prompt, answer)

    def _complete(self, server: Server, content: str | list[int], length: int, answer_tokens: int) -> Answer:
        self.ledger.reserve(length, answer_tokens)
        answer = server.api.complete(server.mode, content, max_tokens=answer_tokens, stop=self._style.stop)
        self.ledger.correct((length, answer_tokens), answer)
        return answer

    def _warm_up(self, server: Server, prompt: Prompt, pieces: int) -> None:
        """Send growing beginnings of the prompt, so that each request prefills one piece behind a cached prefix."""
        whole = prompt.content
        for piece in range(1, pieces):
            length = prompt.length * piece // pieces
            part = whole[: len(whole) * piece // pieces]
            self._complete(server, part, length, 1)

    def neighbours(self, probe: Probe) -> list[Probe]:
        """What runs beside a concurrent probe: prompts of random lengths up to half of its own."""
        if probe.state != "concurrent":
            return []
        least = self.servers[probe.server].composer.fixed_tokens
        sizes = other_lengths(probe, self._beside, least)
        return [replace(probe, state="beside", length=size, of=probe.length) for size in sizes]

    def _among_others(self, probe: Probe) -> Outcome:
        """The probe while its neighbours run. Threads are daemons: Ctrl-C never waits for a request."""
        probes = [probe, *self.neighbours(probe)]
        server = self.servers[probe.server]
        prompts = [server.composer.prompts(recipe(one)) for one in probes]
        results: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()

        def work(number: int) -> None:
            try:
                results.put((number, self._answers(server, prompts[number])))
            except FailedExchange as failed:
                results.put((number, _no_answer(failed)))
            except Exception as error:  # noqa: BLE001 - handed to the thread that asked, which raises it
                results.put((number, error))

        for number in range(len(probes)):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        found = dict(results.get() for _ in probes)
        outcomes = []
        for number in range(len(probes)):
            one = found[number]
            if isinstance(one, BaseException):
                raise one
            outcomes.append(one)
        for neighbour, outcome in zip(probes[1:], outcomes[1:], strict=True):
            self.book.keep(neighbour, outcome)
        return outcomes[0]


def _no_answer(failed: FailedExchange) -> Outcome:
    return Outcome(failure=failed.kind, detail=failed.detail)


def recipe(probe: Probe) -> Recipe:
    """The prompt of a probe. A repeated one is that of the cold probe; one with a shared prefix begins like it."""
    if probe.state == "repeat":
        return Recipe(key=f"cold/{probe.length}/0", length=probe.length, nominal=probe.length)
    if probe.state == "prefix":
        tail = f"prefix/{probe.length}/{probe.attempt}"
        return Recipe(key=f"cold/{probe.of}/0", length=probe.length, nominal=probe.of, tail_key=tail)
    most = _FEW_FACTS if probe.state == "beside" else MOST_FACTS
    key = "/".join(map(str, (probe.state, probe.length, *([probe.of] if probe.of else []), probe.attempt)))
    return Recipe(key=key, length=probe.length, nominal=probe.length, most_facts=most)


def other_lengths(probe: Probe, count: int, least: int) -> list[int]:
    """Distinct random lengths for the requests beside a concurrent probe."""
    source = random.Random(probe.key)
    return source.sample(range(least, max(probe.length // 2, least + 2 * count)), count)


def scored(style: Style, prompt: Prompt, answer: Answer) -> Outcome:
    """Compare the set of values in an answer with the set of planted ones that were asked for."""
    found = style.found(answer.text)
    if len(prompt.asked) < len(prompt.facts):  # one fact asked: the first value is the answer
        found = found[:1]
    planted = {fact.value for fact in prompt.asked}
    return Outcome(
        prompt_tokens=prompt.length if answer.prompt_tokens is None else answer.prompt_tokens,
        counted=answer.prompt_tokens is not None,
        completion_tokens=answer.completion_tokens or 0,
        cached_tokens=answer.cached_tokens,
        seconds=answer.seconds,
        tries=answer.tries,
        finish=answer.finish,
        facts=tuple((fact.label, fact.start, fact.value in found) for fact in prompt.asked),
        invented=len(set(found) - planted),
        prompt_sha256=prompt.sha256,
        tokens=answer.tokens,
        token_kind=answer.token_kind,
        logprobs=answer.logprobs,
        text=answer.text,
    )


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of a probe that asked for its facts one by one; the first request says how much was cached."""
    first = outcomes[0]
    if len(outcomes) == 1:
        return first
    logged = all(outcome.logprobs for outcome in outcomes)
    return replace(
        first,
        completion_tokens=sum(outcome.completion_tokens for outcome in outcomes),
        seconds=sum(outcome.seconds for outcome in outcomes),
        tries=max(outcome.tries for outcome in outcomes),
        facts=tuple(fact for outcome in outcomes for fact in outcome.facts),
        invented=sum(outcome.invented for outcome in outcomes),
        tokens=tuple(token for outcome in outcomes for token in outcome.tokens),
        logprobs=tuple(value for outcome in outcomes for value in outcome.logprobs) if logged else (),
        text="\n".join(outcome.text for outcome in outcomes),
    )


def is_refused(outcome: Outcome) -> bool:
    """Whether the server does not take this form of request."""
    return not outcome.answered and refused(FailedExchange(outcome.failure, outcome.detail))
