"""A proxy in front of a real server that spoils answers to long prompts on their way back, and keeps the others."""

from __future__ import annotations

import http.client
import itertools
import json
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from local_http import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

LONG = 2000  # bytes of a request body
_ENDLESS = b"data: {}\n\n" * 4096


class Spoiler(BaseHTTPRequestHandler):
    upstream: str
    how: Iterator[str | Callable[[], None]]
    limit: int | None
    kept: list[tuple[str, dict[str, Any], dict[str, Any]]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.forward(b"", "lie" if self.limit and self.path.endswith("/models") else "pass")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        how = next(self.how, "pass") if self.path.endswith("completions") and len(body) > LONG else "pass"
        if callable(how):
            how()
            how = "pass"
        if how in {"429", "500"}:
            self.send_response(int(how))
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif how == "hang":
            time.sleep(30)
        elif how == "drip":
            self.send_response(200)
            self.end_headers()
            for byte in itertools.cycle(b"{ "):
                self.wfile.write(bytes((byte,)))
                time.sleep(0.1)
        elif how == "die":
            self.server.shutdown()
            self.server.server_close()
        else:
            self.forward(body, how)

    def forward(self, body: bytes, how: str) -> None:
        connection = http.client.HTTPConnection(self.upstream, timeout=300)
        connection.request(self.command, self.path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if body:
            self.kept.append((self.path, json.loads(body), json.loads(content)))
        self.send_response(answer.status)
        if how != "endless":
            content = self.spoilt(content, how)
            self.send_header("Content-Length", str(10 << 30 if how == "flood" else len(content)))
        self.end_headers()
        while how == "endless":
            self.wfile.write(_ENDLESS)
        self.wfile.write(content[: len(content) // 2] if how == "cut" else content)
        self.close_connection = True

    def spoilt(self, content: bytes, how: str) -> bytes:
        if how == "garbage":
            return bytes(reversed(content))
        if how == "stream":
            return b"data: " + content + b"\n\ndata: [DONE]\n\n"
        if how not in {"lie", "shorter"}:
            return content
        whole = json.loads(content)
        if how == "lie":
            whole["data"][0]["max_model_len"] = self.limit
        else:
            whole["usage"]["prompt_tokens"] //= 2
        return json.dumps(whole).encode()


def spoiling(
    upstream: str,
    *how: str | Callable[[], None],
    limit: int | None = None,
    kept: list[tuple[str, dict[str, Any], dict[str, Any]]] | None = None,
) -> AbstractContextManager[str]:
    """URL of a proxy to ``host:port``.

    Args:
        how: what becomes of the first, second, ... long completion; ``pass`` of every other. A function is called
            before it is passed on.
        limit: what ``/v1/models`` tells instead of the real limit.
        kept: gets path, body and answer of each request that was passed on.
    """
    handler = {"upstream": upstream, "how": iter(how), "limit": limit, "kept": [] if kept is None else kept}
    return serving(type("Handler", (Spoiler,), handler))
