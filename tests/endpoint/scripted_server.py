"""An OpenAI-compatible server whose model reads its prompt: facts are found in the text and repeated, except those that
a rule loses. It exists to inject faults of a known kind; tests against a real engine are in test_real_server.py.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from zlib import crc32

from local_http import serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

PAGE = 16
_TOKEN = re.compile(r" ?\w+|[^\w\s]|\s")
_FACT = re.compile(r"the code of (\w+) is (\d+)\.")
_NAMES = re.compile(r"Names: ([\w, ]+)\nCodes:")


@dataclass(frozen=True)
class Seen:
    """What a rule knows of a request: tokens, how many came from the cache, whether others ran at the same time."""

    tokens: int
    cached: int
    together: bool
    chunk: int

    @property
    def chunks(self) -> int:
        return -(-(self.tokens - self.cached) // self.chunk)


@dataclass
class Script:
    """How the server behaves. ``lose(seen, position)`` says whether a fact is lost; ``refuse`` may answer instead.

    ``forgets``: it says truly that nothing is cached. ``patience``: seconds that a request waits for company, so that requests sent together run together.
    """

    lose: Callable[[Seen, int], bool] = lambda _seen, _position: False
    refuse: Callable[[str, dict[str, Any], int], tuple[int, bytes] | None] = lambda _path, _body, _number: None
    chunk: int = 8192
    limit: int | None = 131072
    tokenizes: bool = True
    completions: bool = True
    extras: bool = True
    counts: bool = True
    tells_cached: bool = True
    forgets: bool = False
    patience: float = 0.02
    thinks: bool = False
    split_digits: bool = False
    jitter: Callable[[int], float] = lambda _number: 0.0
    separator: Callable[[], str] = lambda: ": "
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)


class Model:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.pieces: dict[int, str] = {}
        self.seen: list[list[int]] = []
        self.waiting: list[threading.Event] = []
        self.lock = threading.Lock()

    def tokenize(self, text: str) -> list[int]:
        pieces = _TOKEN.findall(text)
        if self.script.split_digits:
            pieces = [part for piece in pieces for part in (list(piece) if piece.strip().isdigit() else [piece])]
        # A token's id is a function of its text alone: two servers, and any order of requests, agree on it.
        ids = [crc32(piece.encode()) for piece in pieces]
        with self.lock:
            self.pieces.update(zip(ids, pieces, strict=True))
        return ids

    def text(self, ids: list[int]) -> str:
        return "".join(self.pieces[token] for token in ids)

    def answer(self, ids: list[int], *, answering: bool) -> tuple[str, int]:
        company = threading.Event()
        with self.lock:
            self.waiting.append(company)
            if len(self.waiting) > 1:
                for one in self.waiting:
                    one.set()
            cached = max((_common(ids, known) for known in self.seen), default=0)
            cached = 0 if self.script.forgets else min(cached, len(ids) - 1) // PAGE * PAGE
            self.seen.append(ids)
        together = company.wait(self.script.patience)
        with self.lock:
            self.waiting.remove(company)
        seen = Seen(len(ids), cached, together, self.script.chunk)
        if not answering:
            return "", cached
        text = self.text(ids)
        starts = [match.start() for match in _TOKEN.finditer(text)]
        kept = {
            match[1]: match[2]
            for match in _FACT.finditer(text)
            if not self.script.lose(seen, bisect_left(starts, match.start()))
        }
        asked = _NAMES.search(text)
        names = asked[1].split(", ") if asked else []
        return "\n".join(f"{name}{self.script.separator()}{kept.get(name, 'xx')}" for name in names), cached


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Handler(BaseHTTPRequestHandler):
    model: Model

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.handle_json({})

    def do_POST(self) -> None:
        self.handle_json(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_json(self, body: dict[str, Any]) -> None:
        script = self.model.script
        script.requests.append((self.path, body, dict(self.headers)))
        refused = script.refuse(self.path, body, len(script.requests))
        status, content = refused or self.route(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def route(self, body: dict[str, Any]) -> tuple[int, bytes]:
        script = self.model.script
        path = self.path.removeprefix("/base")
        if path == "/v1/models":
            return _ok({"data": [{"id": "scripted", "max_model_len": script.limit}]})
        if path == "/version":
            return _ok({"version": "1.2.3"})
        if path == "/tokenize" and script.tokenizes:
            ids = self.model.tokenize(_prompt_text(body))
            return _ok({"tokens": ids, "count": len(ids), "max_model_len": script.limit})
        if path == "/v1/completions" and script.completions:
            return self.complete(body, body["prompt"])
        if path == "/v1/chat/completions":
            return self.complete(body, _prompt_text(body))
        return 404, b'{"detail":"Not Found"}'

    def complete(self, body: dict[str, Any], prompt: str | list[int]) -> tuple[int, bytes]:
        script, chat = self.model.script, "messages" in body
        if not script.extras and set(body) & {"return_token_ids", "chat_template_kwargs"}:
            return 400, b'{"error":"unknown field"}'
        ids = self.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        if script.limit and len(ids) > script.limit:
            return 400, b'{"error":"too long"}'
        text, cached = self.model.answer(ids, answering=body["max_tokens"] > 1)
        whole = self.model.tokenize(text)
        out = whole[: body["max_tokens"]]
        text = self.model.text(out)
        logprobs = [-0.5 - script.jitter(len(script.requests)) for _ in out]
        finish = "stop" if out == whole else "length"
        choice: dict[str, Any] = {"index": 0}
        if chat:
            thinking = script.thinks and not body.get("chat_template_kwargs")
            if thinking and body["max_tokens"] < 500:
                text, finish = "", "length"
            choice["message"] = {"content": text, "reasoning_content": "let me see" if thinking else None}
            entries = [
                {"token": self.model.pieces[token], "logprob": value}
                for token, value in zip(out, logprobs, strict=True)
            ]
            choice["logprobs"] = {"content": entries}
        else:
            choice |= {"text": text, "logprobs": {"tokens": list(map(str, out)), "token_logprobs": logprobs}}
        choice["finish_reason"] = finish
        if body.get("return_token_ids"):
            choice["token_ids"] = out
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": len(out)}
        if script.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return _ok({"choices": [choice]} | ({"usage": usage} if script.counts else {}))


def _ok(content: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps(content).encode()


def _prompt_text(body: dict[str, Any]) -> str:
    if "messages" in body:
        return f"<user>{body['messages'][0]['content']}<assistant>"
    return body["prompt"]


def serve(script: Script) -> AbstractContextManager[str]:
    """The server's URL."""
    return serving(type("Scripted", (Handler,), {"model": Model(script)}))
