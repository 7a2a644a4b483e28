"""One run against an endpoint: connect, show the cost, sweep, localise, report."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import NotCheckableError
from ..report import Check, Report
from . import style as styles
from .compare import SAME_PROMPTS, Difference, check_same, differences, first_difference
from .connect import Connector
from .localise import Localiser
from .options import as_saved, new_seed, parse
from .outcome import STATES, Book, StoppedError, read_book
from .progress import Progress
from .session import Ledger, Session, is_refused, other_lengths
from .sweep import ATTEMPTS, Trial, again, lengths_to_ask, planned, trial_of, try_out
from .transport import FailedExchange

if TYPE_CHECKING:
    import argparse

    from .api import Identity
    from .options import Options
    from .outcome import Outcome, Probe
    from .session import Server
    from .style import Style

_INTERRUPTED = 128 + signal.SIGINT
_WHAT = "the answer holds exactly the planted values"


@dataclass(kw_only=True, slots=True)
class Run:
    """What a run has found so far; whole only when ``stopped`` is empty."""

    options: Options
    book: Book
    ledger: Ledger
    identities: list[Identity] = field(default_factory=list)
    plan: list[Probe] = field(default_factory=list)
    asked: list[Probe] = field(default_factory=list)
    localiser: Localiser | None = None
    compared: list[Difference] | None = None
    stopped: str = ""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def trials(self) -> list[Trial]:
        """What was asked of the plan, as far as the book has it: a run may stop between two attempts."""
        return [
            trial for probe in self.asked if (trial := trial_of(probe, self.book, self.options.min_recall)).outcomes
        ]

    @property
    def unanswered(self) -> list[Trial]:
        """Probes that were asked and got no answer."""
        return [trial for trial in self.trials if not trial.answered]

    @property
    def faulty(self) -> bool:
        """Whether facts were lost anywhere."""
        return any(trial.failures for trial in self.trials)

    @property
    def exit_code(self) -> int:
        """0 verified, 1 facts were lost, 3 something was not answered or not asked, 130 interrupted."""
        if self.interrupted:
            return _INTERRUPTED
        if self.faulty:
            return 1
        return 3 if self.unanswered or self.stopped else 0


def run_target(args: argparse.Namespace) -> int:
    """Exit code 0 verified, 1 a fault found, 2 wrong usage, 3 could not be checked."""
    from . import render

    options = parse(args)
    style = styles.load(options.style) if options.style else styles.DEFAULT
    earlier = read_book("--against", options.against) if options.against else None
    resumed = read_book("--resume", options.save) if options.resume and options.save else None
    if like := resumed or earlier:
        options = as_saved(options, like.settings)
    book = _book(options, style, resumed, earlier)
    done = Run(options=options, book=book, ledger=Ledger(options.budget_tokens))
    began = time.monotonic()
    with Progress(quiet=options.format == "quiet") as progress:
        try:
            if _prepare_and_sweep(done, style, progress):
                return 0
        except StoppedError as stopped:
            done.stopped = str(stopped)
        except FailedExchange as failed:
            done.stopped = f"the server failed on a side request: {failed}"
        except KeyboardInterrupt:
            done.interrupted, done.stopped = True, "interrupted"
    done.seconds = time.monotonic() - began
    if earlier is not None:
        done.compared = differences(earlier, book, options.min_recall)
    if not done.trials:
        if done.interrupted:
            raise KeyboardInterrupt
        raise NotCheckableError(f"no prompt was judged: {done.stopped}")
    result = report(done)
    render.show(done, result)
    render.write_files(done, result)
    return done.exit_code


def _book(options: Options, style: Style, resumed: Book | None, earlier: Book | None) -> Book:
    """The book of this run: new, continued, or with the prompts of an earlier run."""
    like = resumed or earlier
    settings = {
        "seed": options.seed if options.seed is not None else like.settings["seed"] if like else new_seed(),
        "lengths": list(options.lengths) if options.lengths else like.settings["lengths"] if like else None,
        "index_topk": options.index_topk,
        "chunk_tokens": options.chunk_tokens[0],
        "style_sha256": hashlib.sha256(json.dumps(asdict(style)).encode()).hexdigest(),
        "concurrency": options.concurrency,
    }
    if resumed:
        check_same("--resume", resumed.settings, settings, (*SAME_PROMPTS, "concurrency"))
        resumed.path = options.save
        return resumed
    if earlier:
        check_same("--against", earlier.settings, settings, SAME_PROMPTS)
    return Book(settings=settings, path=options.save)


def _prepare_and_sweep(done: Run, style: Style, progress: Progress) -> bool:
    """True where nothing was to be sent (``--dry-run``)."""
    options, book = done.options, done.book
    connector = Connector(options, style, book, done.ledger, progress)
    servers = []
    for number in range(len(options.endpoints)):
        server, identity = connector.connect(number)
        servers.append(server)
        done.identities.append(identity)
    first = servers[0]
    asked = tuple(book.settings["lengths"]) if book.settings["lengths"] else None
    lengths = lengths_to_ask(asked, first.limit, first.answer_tokens)
    book.settings = {**book.settings, "lengths": list(lengths)}
    done.plan = planned(
        lengths, index_topk=options.index_topk, least=first.composer.fixed_tokens, beside=options.concurrency
    )
    progress.say(cost_line(done.plan, first, style, options.concurrency))
    if options.dry_run:
        return True
    session = Session(servers, style, book, done.ledger, progress, beside=options.concurrency)
    for probe in done.plan:
        progress.expect(probe)
    sweep(session, done, progress)
    _localise(session, done)
    return False


def sweep(session: Session, done: Run, progress: Progress) -> None:
    """Ask the plan. Where a length fails cold, only cold and repeated prompts are asked at and above it."""
    failing = False
    for probe in done.plan:
        if failing and probe.state in {"prefix", "concurrent"}:
            progress.skip(probe)
            continue
        attempts = 1 if failing else ATTEMPTS  # beyond a failing length one answer tells enough
        done.asked.append(probe)
        done.asked += [one for attempt in range(attempts) for one in session.neighbours(again(probe, attempt))]
        trial = try_out(session, probe, done.options.min_recall, attempts)
        failing = failing or (probe.state == "cold" and trial.fails)


def _localise(session: Session, done: Run) -> None:
    if not done.faulty:
        return
    baseline = next(
        outcome.prompt_tokens for key, outcome in done.book.outcomes.items() if key.startswith("0:baseline")
    )
    done.localiser = Localiser(
        session,
        done.trials,
        baseline=baseline,
        index_topk=done.options.index_topk,
        chunk_tokens=done.options.chunk_tokens,
        resolution=done.options.resolution,
        least=done.options.min_recall,
    )
    done.localiser.localise()


def cost_line(plan: list[Probe], server: Server, style: Style, beside: int) -> str:
    """What a run costs when nothing fails."""
    each = style.ask == "each"
    fixed = server.composer.fixed_tokens
    requests = prompt_tokens = 0
    for probe in plan:
        own = server.composer.facts_of(probe.length) if each else 1
        others = other_lengths(probe, beside, fixed) if probe.state == "concurrent" else []
        requests += own + len(others) * (4 if each else 1)
        prompt_tokens += probe.length * own + sum(others) * (4 if each else 1)
    answers = requests * server.answer_tokens
    return (
        f"to send: {prompt_tokens:,} prompt tokens in {requests} requests, and at most {answers:,} answer tokens; "
        "a failure is localised with more"
    )


def report(done: Run) -> Report:
    """The result in the form that all targets of verify share."""
    options, localiser = done.options, done.localiser
    checks = [_check(trial) for trial in done.trials if trial.answered]
    facts: dict[str, Any] = {
        "servers": done.book.servers,
        "seed": done.book.settings["seed"],
        "lengths": done.book.settings["lengths"],
        "index_topk": options.index_topk,
        "tokens": {
            "prompt": done.ledger.prompt_tokens,
            "cached": done.ledger.cached_tokens,
            "completion": done.ledger.completion_tokens,
            "requests": done.ledger.requests,
        },
        "complete": not done.stopped,
        "stopped": done.stopped,
        "unanswered": [
            {"probe": trial.probe.key, "failure": trial.outcomes[0].failure, "detail": trial.outcomes[0].detail}
            for trial in done.unanswered
        ],
        "first_failing": asdict(localiser.edge) if localiser and localiser.edge else None,
        "verdicts": [asdict(verdict) for verdict in localiser.verdicts] if localiser else [],
        "not_reproducible": not_reproducible(done.book),
        "against": [asdict(one) for one in done.compared] if done.compared is not None else None,
    }
    cases = [_case(key, outcome) for key, outcome in done.book.outcomes.items()]
    proved, not_proved = _proved(done)
    limits = [identity.limit for identity in done.identities]
    unanswered = [_not_made(trial.probe, _unanswered(trial, limits[trial.probe.server])) for trial in done.unanswered]
    left = [_not_made(probe, f"not asked ({done.stopped or 'a shorter prompt fails'})") for probe in _not_asked(done)]
    return Report(
        target="endpoint",
        facts=facts,
        cases=tuple(cases),
        checks=tuple(checks),
        proved=tuple(proved),
        not_proved=tuple(not_proved),
        seconds=done.seconds,
        unanswered=(*unanswered, *(left if done.stopped else ())),
        skipped=() if done.stopped else tuple(left),
    )


def _not_asked(done: Run) -> list[Probe]:
    asked = {trial.probe.key for trial in done.trials}
    return [probe for probe in done.plan if probe.key not in asked]


def _not_made(probe: Probe, why: str) -> Check:
    return Check(id=f"endpoint.facts.{probe.state}", case=probe.title, what=_WHAT, ok=False, detail=why)


def _check(trial: Trial) -> Check:
    shown = ", ".join(f"{one.recalled} of {len(one.facts)}" if one.answered else one.failure for one in trial.outcomes)
    invented = sum(outcome.invented for outcome in trial.outcomes)
    extra = f"; {invented} values that were never planted" if invented else ""
    if any(outcome.finish == "length" and not outcome.passes(trial.least) for outcome in trial.outcomes):
        extra += "; the answer was cut at its allowance (--answer-tokens)"
    return Check(
        id=f"endpoint.facts.{trial.probe.state}",
        case=trial.probe.title,
        what=_WHAT,
        ok=trial.ok,
        detail="" if trial.ok else f"{shown} recalled{extra}",
        seconds=sum(outcome.seconds for outcome in trial.outcomes),
    )


def _case(key: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "probe": key,
        "failure": outcome.failure,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "completion_tokens": outcome.completion_tokens,
        "seconds": round(outcome.seconds, 3),
        "facts": [{"depth": label, "token": start, "recalled": found} for label, start, found in outcome.facts],
        "invented": outcome.invented,
        "prompt_sha256": outcome.prompt_sha256,
        "tokens_sha256": outcome.token_sha256 if outcome.answered else None,
        "logprobs_sha256": outcome.logprob_sha256,
    }


def not_reproducible(book: Book) -> list[str]:
    """Repeated prompts whose tokens or log probabilities differ: a fact about the server, and no fault."""
    lines = []
    for key, outcome in book.outcomes.items():
        first = book.outcomes.get(key.replace(":repeat/", ":cold/").rpartition("/")[0] + "/0")
        if ":repeat/" not in key or first is None or not (outcome.answered and first.answered):
            continue
        if outcome.recalled != first.recalled:
            continue  # decided by facts
        token, gap = first_difference(first, outcome)
        if token is not None:
            lines.append(f"{outcome.prompt_tokens:,} tokens repeated: answers differ from token {token} on")
        elif gap:
            lines.append(
                f"{outcome.prompt_tokens:,} tokens repeated: same tokens, log probabilities differ by up to {gap:.2g}"
            )
    return list(dict.fromkeys(lines))


def _unanswered(trial: Trial, limit: int | None) -> str:
    outcome = trial.outcomes[0]
    refused = is_refused(outcome) and limit is not None
    promise = f", although it tells a limit of {limit:,} tokens" if refused else ""
    return f"{trial.probe.title}: {outcome.failure}: {outcome.detail}{promise}"


def _came_from_cache(outcome: Outcome) -> bool:
    return (outcome.cached_tokens or 0) > outcome.prompt_tokens // 10


def _proved(done: Run) -> tuple[list[str], list[str]]:
    cold = [trial for trial in done.trials if trial.probe.state == "cold" and trial.answered]
    warm = [trial for trial in cold if _came_from_cache(trial.outcomes[0])]
    good = [trial for trial in done.trials if trial.ok and trial not in warm]
    proved = []
    for state in dict.fromkeys(trial.probe.state for trial in good):
        lengths = sorted({trial.outcomes[0].prompt_tokens for trial in good if trial.probe.state == state})
        shown = ", ".join(f"{length:,}" for length in lengths)
        proved.append(f"{state} ({STATES[state]}): every planted fact recalled at {shown} tokens")
    not_proved = ["that the sparse path ran, and at which index_topk: a black box does not show it"]
    answered = [outcome for trial in done.trials for outcome in trial.outcomes if outcome.answered]
    if not all(outcome.counted for outcome in answered):
        not_proved.append("the lengths: the server counts no tokens, they are ours")
    if any(trial.outcomes[0].cached_tokens is None for trial in cold):
        not_proved.append("what came from a cache: the server does not tell; cold prompts begin with new words")
    if warm:
        shown = ", ".join(f"{trial.outcomes[0].prompt_tokens:,}" for trial in warm)
        not_proved.append(
            f"cold prefill at {shown} tokens: the server says that these prompts came from its cache; restart it, or use another --seed"
        )
    not_proved += [
        f"exact length: asked for {trial.probe.length:,} tokens, the server counted {trial.outcomes[0].prompt_tokens:,}"
        for trial in done.trials
        if trial.answered and trial.outcomes[0].prompt_tokens != trial.probe.length
    ]
    not_proved += [_unanswered(trial, done.identities[trial.probe.server].limit) for trial in done.unanswered]
    if left := _not_asked(done):
        reason = done.stopped or "a shorter prompt fails"
        not_proved.append(f"{len(left)} probes, the first {left[0].title}: not asked ({reason})")
    return proved, not_proved
