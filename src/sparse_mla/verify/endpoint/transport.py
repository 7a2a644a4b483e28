"""One HTTP exchange with hard limits: total time, bytes, no redirect followed, the key to nobody but the endpoint.

Whatever the other side does ends in an answer or in a ``FailedExchange`` with a stable kind. Every wait of one exchange
(connect, TLS, send, each read) counts against one deadline, so a server that drips a byte a second is a time-out too.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import ssl
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ... import __version__
from ...errors import UsageError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_ANSWER_BYTES = 16 << 20
_PIECE = 1 << 16
_DETAIL = 200


class FailedExchange(Exception):  # noqa: N818 - it says what happened, and is no error of ours
    """No usable answer. ``kind`` is stable: unreachable, tls, timeout, cut, too-large, redirect, http-NNN, garbage…"""

    def __init__(self, kind: str, detail: str, *, retry_after: float | None = None) -> None:
        self.kind, self.detail, self.retry_after = kind, detail, retry_after
        super().__init__(f"{kind}: {detail}")


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _TimedSocket:
    """What http.client needs of a socket, with every wait counted against one deadline."""

    def __init__(self, raw: socket.socket, deadline: _Deadline) -> None:
        self._raw, self._deadline = raw, deadline

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._raw.settimeout(self._deadline.left())
            view = view[self._raw.send(view) :]

    def receive_into(self, buffer: WriteableBuffer) -> int:
        self._raw.settimeout(self._deadline.left())
        return self._raw.recv_into(buffer)

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self), _PIECE)

    def close(self) -> None:
        """http.client closes its socket before the body is read; the exchange closes the real one when it ends."""


class _Incoming(io.RawIOBase):
    def __init__(self, timed: _TimedSocket) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._timed.receive_into(buffer)


class _Connection(HTTPConnection):
    """HTTPConnection over a socket that was opened, tunnelled and wrapped already."""

    def __init__(self, host: str, port: int, timed: _TimedSocket) -> None:
        super().__init__(host, port)
        self._timed = timed

    def connect(self) -> None:
        self.sock = self._timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Transport:
    """How to reach one endpoint.

    Attributes:
        base: scheme, host, port and base path; no user, query or fragment.
        key: bearer token, or empty. It is sent to the endpoint alone and blotted out of every text that comes back.
        tls: context for https, or None for http.
        proxy: proxy of the environment or of ``--proxy``; None for a direct connection.
    """

    base: SplitResult
    key: str
    tls: ssl.SSLContext | None
    proxy: SplitResult | None

    def json(self, method: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """Exchange JSON for JSON; ``path`` is below the base path.

        Raises:
            FailedExchange: anything but a 200 with JSON within the limits.
        """
        content = self._exchange(method, path, body, seconds)
        if self.key:  # a server that echoes it must not bring it into files
            content = content.replace(self.key.encode(), b"***")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise FailedExchange("garbage", f"no JSON but {self._text(content)}") from None

    def _exchange(self, method: str, path: str, body: Any, seconds: float) -> bytes:
        deadline = _Deadline(seconds)
        raw: socket.socket | None = None
        stage = "unreachable"
        try:
            raw = self._open(deadline)
            stage = "cut"
            return self._talk(raw, deadline, method, path, body)
        except TimeoutError:
            raise FailedExchange("timeout", f"no complete answer within {seconds:g} s") from None
        except ssl.SSLError as error:
            unknown = isinstance(error, ssl.SSLCertVerificationError)
            hint = "A private authority needs --ca-file" if unknown else "Is it https?"
            raise FailedExchange("tls", f"{error.reason or error}. {hint}") from None
        except (RemoteDisconnected, IncompleteRead):
            raise FailedExchange("cut", "the connection was closed before the answer was complete") from None
        except (HTTPException, UnicodeError) as error:
            raise FailedExchange("garbage", f"no HTTP answer ({type(error).__name__})") from None
        except OSError as error:
            raise FailedExchange(stage, error.strerror or str(error)) from None
        finally:
            if raw is not None:
                raw.close()

    def _open(self, deadline: _Deadline) -> socket.socket:
        host, port = address(self.base)
        raw = socket.create_connection(address(self.proxy or self.base), timeout=deadline.left())
        try:
            if self.proxy and self.tls:
                self._tunnel(_TimedSocket(raw, deadline), f"{_bracketed(host)}:{port}")
            if self.tls:
                raw.settimeout(deadline.left())
                raw = self.tls.wrap_socket(raw, server_hostname=host)
        except BaseException:
            raw.close()
            raise
        return raw

    def _tunnel(self, timed: _TimedSocket, target: str) -> None:
        head = f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self._proxy_headers().items())
        timed.sendall(f"{head}\r\n".encode("latin-1"))
        answer = HTTPResponse(timed, method="CONNECT")  # type: ignore[arg-type]
        answer.begin()
        if answer.status != 200:
            raise FailedExchange("unreachable", f"the proxy answers {answer.status} to CONNECT")

    def _talk(self, raw: socket.socket, deadline: _Deadline, method: str, path: str, body: Any) -> bytes:
        host, port = address(self.base)
        connection = _Connection(host, port, _TimedSocket(raw, deadline))
        headers = {"Accept": "application/json", "Connection": "close", "User-Agent": f"sparse-mla/{__version__}"}
        target = self.base.path + path
        if self.proxy and not self.tls:
            target = f"http://{self.base.netloc}{target}"
            headers |= self._proxy_headers()
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            content = json.dumps(body, separators=(",", ":")).encode()
        connection.request(method, target, content, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise self._refusal(answer)
        return _whole(answer)

    def _refusal(self, answer: HTTPResponse) -> FailedExchange:
        if 300 <= answer.status < 400:
            place = urlsplit(answer.headers.get("Location", ""))
            shown = f"{place.scheme}://{place.hostname}{place.path}" if place.hostname else place.path or "nowhere"
            return FailedExchange("redirect", f"redirected to {shown}; none is followed. Give that URL as --endpoint")
        after = answer.headers.get("Retry-After", "")
        wait = float(after) if after.isascii() and after.isdecimal() else None
        return FailedExchange(f"http-{answer.status}", self._text(answer.read(_PIECE)), retry_after=wait)

    def _text(self, content: bytes) -> str:
        text = content[: 4 * _DETAIL].decode("utf-8", "replace")
        if self.key:
            text = text.replace(self.key, "***")
        text = " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())
        return repr(text[:_DETAIL]) if text else "nothing"

    def _proxy_headers(self) -> dict[str, str]:
        if self.proxy is None or self.proxy.username is None:
            return {}
        pair = f"{unquote(self.proxy.username)}:{unquote(self.proxy.password or '')}"
        return {"Proxy-Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def _whole(answer: HTTPResponse) -> bytes:
    declared = answer.length
    if declared is not None and declared > MAX_ANSWER_BYTES:
        raise FailedExchange("too-large", f"an answer of {declared:,} bytes; the limit is {MAX_ANSWER_BYTES:,}")
    content = bytearray()
    while piece := answer.read(_PIECE):
        content += piece
        if len(content) > MAX_ANSWER_BYTES:
            raise FailedExchange("too-large", f"an answer of more than {MAX_ANSWER_BYTES:,} bytes")
    if declared is not None and len(content) < declared:
        raise FailedExchange("cut", f"closed after {len(content):,} of {declared:,} bytes")
    return bytes(content)


def address(url: SplitResult) -> tuple[str, int]:
    """Host and port of a URL."""
    return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def transport(url: str, *, key: str = "", ca_file: str | None = None, proxy: str | None = None) -> Transport:
    """Check a URL, a key, a CA file and a proxy given by a user.

    Raises:
        UsageError: one of them cannot be used.
    """
    base = _url("--endpoint", url)
    if base.username is not None or base.query or base.fragment:
        raise UsageError(
            "--endpoint",
            needs="a URL without user, query and fragment",
            got=repr(base.hostname),
            hint="Keys: --api-key-env.",
        )
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError("the API key", needs="printable ASCII", got="other characters")
    tls = None
    if base.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # SSLError is one
            raise UsageError("--ca-file", needs="a PEM file of certificates", got=f"{ca_file}: {error}") from None
    return Transport(base=base._replace(path=base.path.rstrip("/")), key=key, tls=tls, proxy=_proxy(base, proxy))


def _proxy(base: SplitResult, asked: str | None) -> SplitResult | None:
    host = base.hostname or ""
    if asked is None and not proxy_bypass(host):
        found = getproxies()
        asked = found.get(base.scheme) or found.get("all")
        if asked and "://" not in asked:
            asked = f"http://{asked}"
    if not asked or asked == "none":
        return None
    proxy = _url("proxy", asked)
    if proxy.scheme != "http":
        raise UsageError("proxy", needs="http://…", got=f"{proxy.scheme}://…", hint="--proxy none connects directly.")
    return proxy


def _url(name: str, text: str) -> SplitResult:
    try:
        url = urlsplit(text)
        address(url)
    except ValueError as error:
        raise UsageError(name, needs="an http or https URL", got=str(error)) from None
    path = url.path
    if url.scheme not in {"http", "https"} or not url.hostname or not (path.isascii() and path.isprintable()):
        raise UsageError(name, needs="an http or https URL", got=repr(text.rpartition("@")[2]))
    if any(sign.isspace() for sign in path):
        raise UsageError(name, needs="a URL without spaces", got=repr(path))
    return url
