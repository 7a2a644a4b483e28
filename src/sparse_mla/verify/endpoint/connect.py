"""From a URL to a server that can be asked: who it is, how it takes prompts, and that it answers at short length."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...errors import NotCheckableError
from .api import Api, Mode
from .compare import check_same
from .meters import IdMeter, TextMeter
from .outcome import Outcome, Probe
from .prompts import Composer
from .session import BASELINE, Server, Session, is_refused
from .transport import FailedExchange, transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .api import Identity
    from .options import Options
    from .outcome import Book
    from .progress import Progress
    from .prompts import Meter
    from .session import Ledger
    from .style import Style

BASELINE_TOKENS = 1000
_HOPELESS = {"unreachable", "timeout", "tls", "redirect", "http-401", "http-403", "http-429"}
_NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
_COMPLETION_EXTRAS: tuple[dict[str, Any], ...] = ({"logprobs": 1, "return_token_ids": True}, {"logprobs": 1}, {})
_CHAT_EXTRAS: tuple[dict[str, Any], ...] = ({"logprobs": True, "return_token_ids": True}, {"logprobs": True}, {})


def modes(api: str, *, tokenizes: bool) -> Iterator[tuple[Mode, tuple[dict[str, Any], ...]]]:
    """Ways to send prompts, the most exact first, each with the extras that a server may refuse."""
    if api in {"auto", "completions"}:
        if tokenizes:
            yield Mode(name="completions, token ids", ids=True), _COMPLETION_EXTRAS
        yield Mode(name="completions, text"), _COMPLETION_EXTRAS
    if api in {"auto", "chat"}:
        quiet = tuple(extras | _NO_THINKING for extras in _CHAT_EXTRAS)
        yield Mode(name="chat, thinking off", chat=True), quiet
        yield Mode(name="chat", chat=True, thinking=True), _CHAT_EXTRAS


class Connector:
    """Connects to the endpoints of one run. ``make_api`` is replaced in tests."""

    def __init__(self, options: Options, style: Style, book: Book, ledger: Ledger, progress: Progress) -> None:
        self._options, self._style, self._book = options, style, book
        self._ledger, self._progress = ledger, progress

    def connect(self, number: int) -> tuple[Server, Identity]:
        """Server ``number`` (0 or 1), settled on the first mode in which it recalls all facts of a short prompt.

        Raises:
            NotCheckableError: no answer in any mode, or none that holds the facts.
        """
        options = self._options
        where = transport(
            options.endpoints[number], key=options.keys[number], ca_file=options.ca_file, proxy=options.proxy
        )
        api = Api(where, timeout=options.timeout, retries=options.retries)
        identity = api.identify(options.model)
        self._progress.say(
            f"{'second ' if number else ''}endpoint: {identity.model}, version {identity.version or 'not told'}, "
            f"context {f'{identity.limit:,}' if identity.limit else 'not told'}"
        )
        complaints = []
        for mode, extras in modes(options.api, tokenizes=identity.tokenizes):
            server, outcome = self._settle(number, api, identity, mode, extras)
            if server is not None and outcome.passes(options.min_recall):
                self._keep(number, server, outcome, identity)
                return server, identity
            complaints.append(f"{mode.name}: {_complaint(outcome)}")
            if outcome.failure in _HOPELESS:
                break
        raise NotCheckableError(
            f"the {'second ' if number else ''}endpoint gives no answer to build on to a short prompt "
            f"({'; '.join(complaints)})",
            hint="Where a short prompt fails, length cannot be judged: check model, chat template and --style.",
        )

    def _settle(
        self, number: int, api: Api, identity: Identity, mode: Mode, extras: tuple[dict[str, Any], ...]
    ) -> tuple[Server | None, Outcome]:
        outcome = Outcome(failure="http-400", detail="no form of request was tried")
        for extra in extras:
            chosen = replace(mode, extras=extra)
            try:
                server = self._server(api, identity, chosen)
            except FailedExchange as failed:
                outcome = Outcome(failure=failed.kind, detail=failed.detail)
            else:
                length = baseline_tokens(server.composer, self._options.index_topk)
                probe = Probe(state=BASELINE, length=length, server=number)
                outcome = Session(
                    [server] * (number + 1), self._style, self._book, self._ledger, self._progress, beside=0
                ).attempt(probe)
                if not is_refused(outcome):
                    return server, outcome
            if not is_refused(outcome):
                break
        return None, outcome

    def _server(self, api: Api, identity: Identity, mode: Mode) -> Server:
        options = self._options
        meter: Meter
        if mode.ids:
            meter = IdMeter(lambda text, special: api.tokenize(text, special=special), self._style)
        else:
            meter = TextMeter(self._counter(api, identity, mode), self._style)
        composer = Composer(
            self._style,
            meter,
            seed=int(self._book.settings["seed"]),
            index_topk=options.index_topk,
            chunk_tokens=options.chunk_tokens[0],
        )
        answer_tokens = options.answer_tokens + (options.thinking_tokens if mode.thinking else 0)
        return Server(api=api, mode=mode, composer=composer, limit=identity.limit, answer_tokens=answer_tokens)

    def _counter(self, api: Api, identity: Identity, mode: Mode) -> Callable[[str], int]:
        def count(text: str) -> int:
            if identity.tokenizes:
                return api.count(mode, text)
            self._ledger.reserve(reserved := len(text) // 2, 1)
            answer = api.complete(mode, text, max_tokens=1)
            self._ledger.correct((reserved, 1), answer)
            if not answer.prompt_tokens:
                raise NotCheckableError(
                    "the endpoint counts no tokens",
                    needs="usage.prompt_tokens in its answers, or /tokenize",
                    got="neither",
                )
            return answer.prompt_tokens

        return count

    def _keep(self, number: int, server: Server, outcome: Outcome, identity: Identity) -> None:
        length = outcome.prompt_tokens
        entry = asdict(identity) | {"mode": server.mode.name, "token_kind": outcome.token_kind}
        for before in self._book.servers[number : number + 1]:  # of the run that is resumed
            check_same("--resume", before, entry, ("model", "mode"))
        self._progress.say(
            f"asked as {server.mode.name}; {outcome.recalled} of {len(outcome.facts)} facts at {length:,} tokens"
        )
        del self._book.servers[number:]
        self._book.servers.append(entry)
        self._book.keep(Probe(state=BASELINE, length=length, server=number), outcome)


def baseline_tokens(composer: Composer, index_topk: int) -> int:
    """A length at which attention is not sparse yet, where the fixed parts of a prompt leave room for that."""
    return max(min(BASELINE_TOKENS, index_topk), composer.fixed_tokens + 64)


def _complaint(outcome: Outcome) -> str:
    if outcome.answered:
        cut = ", cut at the allowance of --answer-tokens" if outcome.finish == "length" else ""
        return f"{outcome.recalled} of {len(outcome.facts)} facts, {outcome.invented} invented{cut}"
    return f"{outcome.failure}, {outcome.detail}"
