"""A socket server whose every byte is scripted, for what a well-behaved HTTP server would never send."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator


def request_head(connection: socket.socket) -> bytes:
    """Everything up to the empty line, and the body that Content-Length announces."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            while len(body) < int(line.split(b":")[1]):
                body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def raw_server(
    behave: Callable[[socket.socket, bytes], None], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """Port, and the requests that came. ``behave`` sends what it likes; the connection is closed after it."""
    requests: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def one(raw: socket.socket) -> None:
        with contextlib.suppress(OSError), raw:
            connection = tls.wrap_socket(raw, server_side=True) if tls else raw
            with connection:
                requests.append(request_head(connection))
                behave(connection, requests[-1])

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], requests
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
