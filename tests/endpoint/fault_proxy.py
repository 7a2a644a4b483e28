"""A proxy in front of a real server that spoils answers to long prompts on their way back."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SPOILT_FROM = 2000  # bytes of a request body


class Spoiler(BaseHTTPRequestHandler):
    upstream: str
    how: str

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.forward(b"")

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, body: bytes) -> None:
        spoilt = self.path.endswith("/completions") and len(body) > SPOILT_FROM
        if spoilt and self.how in {"429", "500"}:
            self.send_error(int(self.how))
            return
        if spoilt and self.how == "hang":
            time.sleep(20)
            return
        connection = http.client.HTTPConnection(self.upstream, timeout=300)
        connection.request(self.command, self.path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if spoilt and self.how == "garbage":
            content = bytes(reversed(content))
        self.send_response(answer.status)
        self.send_header("Content-Length", str(10 << 30 if spoilt and self.how == "flood" else len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if spoilt and self.how == "cut" else content)
        self.close_connection = True


@contextmanager
def spoiling(upstream: str, how: str) -> Iterator[str]:
    """URL of a proxy to ``host:port``; ``how``: pass, 429, 500, hang, garbage, flood or cut."""
    handler = type("Handler", (Spoiler,), {"upstream": upstream, "how": how})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
