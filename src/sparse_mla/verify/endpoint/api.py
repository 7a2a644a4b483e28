"""An OpenAI-compatible server as a client sees it: what it is, how it counts tokens, what it answers.

Every value that a server sends is checked for its type; what does not fit is ``garbage``, never a crash later.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import NotCheckableError, UsageError
from .transport import FailedExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .transport import Transport

_SHORT_SECONDS = 30.0
_LONGEST_WAIT = 60.0
_WORTH_ANOTHER_TRY = {"http-429", "http-500", "http-502", "http-503", "http-504", "cut", "unreachable"}
_REFUSED = {"http-400", "http-404", "http-405", "http-415", "http-422", "http-501"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How prompts are sent: completions with token ids or text, or chat with thinking switched off or left on."""

    name: str
    chat: bool = False
    ids: bool = False
    thinking: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        text: the answer without reasoning.
        tokens: token ids as text, else token strings, else the text as one piece (``token_kind`` says which).
        logprobs: one for each token where the server gives them; may be empty.
        prompt_tokens: the server's own count; None where it gives none. Likewise the others.
        seconds: wall time of the last try.
        tries: 1, or more after answers like 429.
        unfinished: the allowance went into reasoning, and no answer began.
    """

    text: str
    tokens: tuple[str, ...]
    token_kind: str
    logprobs: tuple[float, ...]
    finish: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    seconds: float
    tries: int
    unfinished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a server says about itself; ``limit`` is its context length in tokens."""

    model: str
    version: str | None
    limit: int | None
    tokenizes: bool


class Api:
    """Calls to one server. ``sleep`` waits between tries (replaced in tests)."""

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float,
        retries: int,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        version = re.search(r"/v\d+\w*$", transport.base.path)
        self._prefix = version[0] if version else "/v1"
        root = transport.base.path.removesuffix(version[0]) if version else transport.base.path
        self._transport = dataclasses.replace(transport, base=transport.base._replace(path=root))
        self._timeout, self._retries, self._sleep = timeout, retries, sleep
        self._model = ""

    def identify(self, model: str | None) -> Identity:
        """Ask what is served, in which version, with which limit, and whether it tokenizes for us.

        Raises:
            NotCheckableError: nothing answers, or the key is refused.
            UsageError: several models are served, and none or another was named.
        """
        served = self._models(model)
        self._model = model or _only(served)
        if served and self._model not in served:
            raise UsageError("--model", needs=f"one of {', '.join(sorted(served)[:10])}", got=self._model)
        version = self._version()
        counted = self._quietly("POST", "/tokenize", {"model": self._model, "prompt": "a b"})
        tokens = counted.get("tokens") if isinstance(counted, dict) else None
        limit = served.get(self._model)
        if limit is None and isinstance(counted, dict):
            limit = _count(counted.get("max_model_len"))
        tokenizes = isinstance(tokens, list) and bool(tokens) and all(type(token) is int for token in tokens)
        return Identity(model=self._model, version=version, limit=limit, tokenizes=tokenizes)

    def _models(self, model: str | None) -> dict[str, int | None]:
        try:
            listed = self._transport.json("GET", f"{self._prefix}/models", seconds=min(_SHORT_SECONDS, self._timeout))
        except FailedExchange as failed:
            if model and failed.kind in _REFUSED:
                return {}
            hint = "Give the key's variable with --api-key-env." if failed.kind in {"http-401", "http-403"} else None
            raise NotCheckableError(
                f"the endpoint does not list its models ({failed})", hint=hint or "Is it an OpenAI-compatible server?"
            ) from None
        data = listed.get("data") if isinstance(listed, dict) else None
        entries = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
        names = ("max_model_len", "context_length", "context_window", "max_context_length")
        return {
            entry["id"]: next((limit for name in names if (limit := _count(entry.get(name)))), None)
            for entry in entries
            if isinstance(entry.get("id"), str) and entry["id"].isprintable()
        }

    def _version(self) -> str | None:
        found = self._quietly("GET", "/version")
        version = found.get("version") if isinstance(found, dict) else None
        return version[:80] if isinstance(version, str) and version.isprintable() else None

    def _quietly(self, method: str, path: str, body: Any = None) -> Any:
        try:
            return self._transport.json(method, path, body, seconds=min(_SHORT_SECONDS, self._timeout))
        except FailedExchange:
            return None

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a piece of text (vLLM's ``/tokenize``)."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        counted, _, _ = self._patiently("/tokenize", body, self._timeout)
        tokens = counted.get("tokens") if isinstance(counted, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise FailedExchange("garbage", "/tokenize gives no list of token ids")
        return tokens

    def count(self, mode: Mode, text: str) -> int:
        """Tokens of a whole prompt of this text, chat template included (vLLM's ``/tokenize``)."""
        body: dict[str, Any] = {"model": self._model}
        if mode.chat:
            thinking = {name: value for name, value in mode.extras.items() if name == "chat_template_kwargs"}
            body |= {"messages": [{"role": "user", "content": text}], **thinking}
        else:
            body["prompt"] = text
        counted, _, _ = self._patiently("/tokenize", body, self._timeout)
        count = _count(counted.get("count")) if isinstance(counted, dict) else None
        if count is None:
            raise FailedExchange("garbage", "/tokenize gives no count")
        return count

    def complete(self, mode: Mode, prompt: str | list[int], *, max_tokens: int, stop: tuple[str, ...] = ()) -> Answer:
        """One greedy answer.

        Raises:
            FailedExchange: no usable answer after all tries.
        """
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens, "temperature": 0, **mode.extras}
        if mode.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
            answered, seconds, tries = self._patiently(f"{self._prefix}/chat/completions", body, self._timeout)
            return _chat_answer(answered, seconds, tries)
        body |= {"prompt": prompt} | ({"stop": list(stop)} if stop else {})
        answered, seconds, tries = self._patiently(f"{self._prefix}/completions", body, self._timeout)
        return _completion_answer(answered, seconds, tries)

    def _patiently(self, path: str, body: Any, timeout: float) -> tuple[Any, float, int]:
        for attempt in range(1, self._retries + 2):
            began = time.monotonic()
            try:
                answered = self._transport.json("POST", path, body, seconds=timeout)
            except FailedExchange as failed:
                wait = failed.retry_after if failed.retry_after is not None else float(2**attempt)
                hopeless = failed.kind not in _WORTH_ANOTHER_TRY or wait > _LONGEST_WAIT
                if hopeless or attempt > self._retries:
                    raise
                self._sleep(wait)
            else:
                return answered, time.monotonic() - began, attempt
        raise AssertionError("unreachable")


def refused(failed: FailedExchange) -> bool:
    """Whether the server said that it does not take this form of request, as opposed to failing on it."""
    return failed.kind in _REFUSED


def _only(served: dict[str, int | None]) -> str:
    if len(served) != 1:
        raise UsageError(
            "--model",
            needs=f"one of {', '.join(sorted(served)[:10]) or 'the names it serves'}",
            got=f"{len(served)} models",
        )
    return next(iter(served))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 40 else None


def _choice(answered: Any) -> dict[str, Any]:
    choices = answered.get("choices") if isinstance(answered, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise FailedExchange("garbage", "JSON without choices")
    return choices[0]


def _part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    value = whole.get(name)
    return value if isinstance(value, dict) else {}


def _completion_answer(answered: Any, seconds: float, tries: int) -> Answer:
    choice = _choice(answered)
    text = choice.get("text")
    if not isinstance(text, str):
        raise FailedExchange("garbage", "a choice without text")
    logged = _part(choice, "logprobs")
    return _answer(answered, choice, text, logged.get("tokens"), logged.get("token_logprobs"), seconds, tries)


def _chat_answer(answered: Any, seconds: float, tries: int) -> Answer:
    choice = _choice(answered)
    message = choice.get("message")
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        raise FailedExchange("garbage", "a choice without message content")
    text = message.get("content") or ""
    thought = next((value for name in ("reasoning_content", "reasoning") if (value := message.get(name))), None)
    before, closed, after = text.rpartition("</think>")
    text = after if closed else before + after
    open_thought = bool(thought and not text.strip()) or (not closed and text.lstrip().startswith("<think>"))
    logged = _part(choice, "logprobs")
    content = logged.get("content")
    entries = content if isinstance(content, list) and all(isinstance(entry, dict) for entry in content) else []
    tokens = [entry.get("token") for entry in entries]
    logprobs = [entry.get("logprob") for entry in entries]
    answer = _answer(answered, choice, text, tokens, logprobs, seconds, tries)
    return dataclasses.replace(answer, unfinished=open_thought and answer.finish == "length")


def _answer(
    answered: dict[str, Any], choice: dict[str, Any], text: str, tokens: Any, logprobs: Any, seconds: float, tries: int
) -> Answer:
    usage = _part(answered, "usage")
    details = _part(usage, "prompt_tokens_details")
    ids = choice.get("token_ids")
    if isinstance(ids, list) and ids and all(type(token) is int for token in ids):
        kind, pieces = "ids", tuple(map(str, ids))
    elif isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens):
        kind, pieces = "strings", tuple(tokens)
    else:
        kind, pieces = "text", (text,)
    finish = choice.get("finish_reason")
    return Answer(
        text=text.encode("utf-8", "replace").decode(),
        tokens=pieces,
        token_kind=kind,
        logprobs=_logprobs(logprobs, len(pieces)),
        finish=finish[:40] if isinstance(finish, str) else "",
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
        seconds=seconds,
        tries=tries,
    )


def _logprobs(values: Any, count: int) -> tuple[float, ...]:
    """Finite ones for every token, or none at all."""
    if not isinstance(values, list) or len(values) != count:
        return ()
    numbers = tuple(value for value in values if (type(value) is float and math.isfinite(value)) or value == 0)
    return tuple(map(float, numbers)) if len(numbers) == count else ()
