from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
from raw_server import raw_server, request_head
from scripted_server import Script, serve

from sparse_mla.errors import UsageError
from sparse_mla.verify.endpoint.api import Api
from sparse_mla.verify.endpoint.transport import MAX_ANSWER_BYTES, FailedExchange, transport

KEY = "sk-very-secret-0123"
PATIENT = 60.0  # where an answer is expected, however busy the machine is
PEM = str(Path(__file__).with_name("localhost.pem"))  # made for these tests, trusted nowhere


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def answer(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sends(*pieces: bytes, pause: float = 0.0):
    def behave(connection: socket.socket, _request: bytes) -> None:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)

    return behave


def endless(head: bytes, piece: bytes):
    def behave(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return behave


def silent(connection: socket.socket, _request: bytes) -> None:
    connection.recv(1)  # until the client gives up


def drips(connection: socket.socket, _request: bytes) -> None:
    for letter in answer(b'{"a": 1}' * 99):
        connection.sendall(bytes([letter]))
        time.sleep(0.05)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
FAILURES = {
    "nothing": (sends(), "cut"),
    "half a head": (sends(b"HTTP/1.1 200 OK\r\nContent-"), "garbage"),
    "half a body": (sends(answer(b'{"a":', length=100)), "cut"),
    "half a chunk": (sends(CHUNKED + b"ff\r\n{}"), "cut"),
    "no http": (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "garbage"),
    "binary": (sends(bytes(range(256)) * 40), "garbage"),
    "html": (sends(answer(b"<html>Bad Gateway</html>")), "garbage"),
    "event stream": (sends(answer(b'data: {"choices": []}\n\ndata: [DONE]\n')), "garbage"),
    "half json": (sends(answer(b'{"choices": [{"text": "ab')), "garbage"),
    "deep json": (sends(answer(b"[" * 200_000)), "garbage"),
    "long number": (sends(answer(b"9" * 10_000)), "garbage"),
    "not utf-8": (sends(answer(b'{"a": "\xff\xfe"}')), "garbage"),
    "endless header": (endless(b"HTTP/1.1 200 OK\r\nX: ", b"a" * 65536), "garbage"),
    "endless headers": (endless(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n" * 1000), "garbage"),
    "ten gigabytes announced": (sends(answer(b"{", length=10 << 30)), "too-large"),
    "ten gigabytes in chunks": (endless(CHUNKED, b"10000\r\n" + b"a" * 65536 + b"\r\n"), "too-large"),
    "ten gigabytes without length": (endless(b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 65536), "too-large"),
    "silence": (silent, "timeout"),
    "a byte now and then": (drips, "timeout"),
    "a header now and then": (sends(b"HTTP/1.1 200 OK\r\n", *[b"X: 1\r\n"] * 90, pause=0.25), "timeout"),
    "429": (sends(answer(b"slow down", "429 Too Many Requests", "Retry-After: 7")), "http-429"),
    "500": (sends(answer(b'{"error": "EngineDeadError"}', "500 Internal Server Error")), "http-500"),
    "204": (sends(b"HTTP/1.1 204 No Content\r\n\r\n"), "http-204"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_every_misbehaviour_ends_soon_as_a_failure_of_its_kind(name):
    behave, kind = FAILURES[name]
    with raw_server(behave) as (port, _):
        seconds = 1.5 if kind == "timeout" else PATIENT
        began = time.monotonic()
        with pytest.raises(FailedExchange) as failed:
            transport(f"http://127.0.0.1:{port}").json("POST", "/x", {"prompt": [1] * 1000}, seconds=seconds)
        assert failed.value.kind == kind
        assert time.monotonic() - began < 15  # those that drip would go on for longer
        assert len(failed.value.detail) < 400
        assert failed.value.detail.isprintable()


def test_a_good_answer_of_the_largest_size_arrives():
    body = json.dumps("a" * (MAX_ANSWER_BYTES - 2)).encode()
    with raw_server(sends(answer(body))) as (port, _):
        got = transport(f"http://127.0.0.1:{port}").json("GET", "/x", seconds=PATIENT)
    assert len(got) == MAX_ANSWER_BYTES - 2


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(FailedExchange) as failed:
        transport(f"http://127.0.0.1:{port}").json("GET", "/x", seconds=PATIENT)
    assert failed.value.kind == "unreachable"


def test_the_key_follows_no_redirect_and_leaves_no_trace():
    with raw_server(sends(answer(b"{}"))) as (thief, stolen):
        where = f"http://127.0.0.1:{thief}/v1/models"
        with raw_server(sends(answer(b"", "307 Temporary Redirect", f"Location: {where}"))) as (port, requests):
            with pytest.raises(FailedExchange) as failed:
                transport(f"http://127.0.0.1:{port}", key=KEY).json("GET", "/v1/models", seconds=PATIENT)
            assert failed.value.kind == "redirect"
            assert "http://127.0.0.1/v1/models" in failed.value.detail
            assert f"Authorization: Bearer {KEY}".encode() in requests[0]
    assert stolen == []


def test_an_echoed_key_is_blotted_out():
    refusal = answer(f"no such key: {KEY}".encode(), "401 Unauthorized")
    with raw_server(sends(refusal)) as (port, _), pytest.raises(FailedExchange) as failed:
        transport(f"http://127.0.0.1:{port}", key=KEY).json("GET", "/x", seconds=PATIENT)
    assert failed.value.detail == "'no such key: ***'"
    with raw_server(sends(answer(json.dumps({"text": KEY}).encode()))) as (port, _):
        assert transport(f"http://127.0.0.1:{port}", key=KEY).json("GET", "/x", seconds=PATIENT) == {"text": "***"}


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def test_tls_needs_a_known_authority():
    with raw_server(sends(answer(b"[1]")), server_tls()) as (port, requests):
        with pytest.raises(FailedExchange, match="--ca-file") as failed:
            transport(f"https://localhost:{port}", key=KEY).json("GET", "/x", seconds=PATIENT)
        assert failed.value.kind == "tls"
        assert not any(KEY.encode() in request for request in requests)
        assert transport(f"https://localhost:{port}", ca_file=PEM).json("GET", "/x", seconds=PATIENT) == [1]


def test_tls_to_a_server_that_never_shakes_hands_times_out():
    with raw_server(silent) as (port, _), pytest.raises(FailedExchange) as failed:
        transport(f"https://localhost:{port}", ca_file=PEM).json("GET", "/x", seconds=0.5)
    assert failed.value.kind == "timeout"


def test_http_goes_through_a_proxy_in_absolute_form():
    with raw_server(sends(answer(b"[2]"))) as (port, requests):
        far = transport("http://far.example/base/v1", key=KEY, proxy=f"http://me:p%20w@127.0.0.1:{port}")
        assert far.json("GET", "/models", seconds=PATIENT) == [2]
    assert requests[0].startswith(b"GET http://far.example/base/v1/models HTTP/1.1\r\n")
    assert b"Host: far.example\r\n" in requests[0]
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"me:p w") in requests[0]


def test_https_goes_through_a_tunnel_and_the_proxy_never_sees_the_key(monkeypatch):
    def tunnel(connection: socket.socket, request: bytes) -> None:
        host, port = request.split()[1].decode().rsplit(":", 1)
        with socket.create_connection((host, int(port))) as far:
            connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            pipe = threading.Thread(target=pump, args=(far, connection), daemon=True)
            pipe.start()
            pump(connection, far)
            pipe.join(5)

    seen: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                seen.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    with raw_server(sends(answer(b"[3]")), server_tls()) as (port, _), raw_server(tunnel) as (proxy, asked):
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy}")
        assert transport(f"https://localhost:{port}", key=KEY, ca_file=PEM).json("GET", "/x", seconds=PATIENT) == [3]
    assert asked[0].startswith(f"CONNECT localhost:{port} HTTP/1.1\r\n".encode())
    assert KEY.encode() not in b"".join(seen) + asked[0]


def test_a_proxy_that_refuses_is_named_and_no_proxy_is_honoured(monkeypatch):
    refusal = sends(answer(b"", "407 Proxy Authentication Required"))
    with raw_server(refusal) as (proxy, _), pytest.raises(FailedExchange, match="the proxy answers 407"):
        transport("https://localhost:1", proxy=f"http://127.0.0.1:{proxy}").json("GET", "/x", seconds=PATIENT)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with raw_server(sends(answer(b"[4]"))) as (port, _):
        assert transport(f"http://127.0.0.1:{port}").json("GET", "/x", seconds=PATIENT) == [4]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://x:99999",
        "http://u:p@x",
        "http://x/?a=1",
        "http://x/a b",
        "http://[",
    ],
)
def test_urls_that_cannot_be_used_say_so_without_their_password(url):
    with pytest.raises(UsageError, match="--endpoint") as error:
        transport(url)
    assert "u:p" not in str(error.value)
    assert error.value.exit_code == 2


def test_keys_and_files_that_cannot_be_used(tmp_path):
    with pytest.raises(UsageError, match="printable ASCII"):
        transport("http://x", key="a\r\nX-Evil: 1")
    with pytest.raises(UsageError, match="--ca-file"):
        transport("https://x", ca_file=str(tmp_path / "none.pem"))
    with pytest.raises(UsageError, match="proxy: needs an http"):
        transport("http://x", proxy="socks5://127.0.0.1:1080")


def test_a_busy_server_is_asked_again_after_the_time_it_names():
    waits: list[float] = []
    busy = Script(refuse=lambda path, _body, number: (429, b"busy") if "completions" in path and number < 5 else None)
    with serve(busy) as url:
        api = Api(transport(url), timeout=PATIENT, retries=3, sleep=waits.append)
        api.identify(None)
        tokens = api.tokenize("a b", special=False)
    assert len(tokens) == 2
    with raw_server(sends(answer(b"", "429 Too Many Requests", "Retry-After: 7"))) as (port, requests):
        api = Api(transport(f"http://127.0.0.1:{port}"), timeout=PATIENT, retries=2, sleep=waits.append)
        with pytest.raises(FailedExchange, match="http-429"):
            api.tokenize("a", special=False)
    assert waits == [7.0, 7.0]
    assert len(requests) == 3
    with raw_server(sends(answer(b"", "429 Too Many Requests", "Retry-After: 3600"))) as (port, requests):
        api = Api(transport(f"http://127.0.0.1:{port}"), timeout=PATIENT, retries=2, sleep=waits.append)
        with pytest.raises(FailedExchange, match="http-429"):
            api.tokenize("a", special=False)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("base", "asked"),
    [
        ("", "/v1/models"),
        ("/", "/v1/models"),
        ("/v1", "/v1/models"),
        ("/a/b/v1/", "/a/b/v1/models"),
        ("/p/v4", "/p/v4/models"),
    ],
)
def test_base_paths(base, asked):
    listed = json.dumps({"data": [{"id": "m"}]}).encode()
    with raw_server(sends(answer(listed))) as (port, requests):
        Api(transport(f"http://127.0.0.1:{port}{base}"), timeout=PATIENT, retries=0).identify(None)
    paths = [request.split()[1].decode() for request in requests]
    root = asked.rsplit("/", 2)[0]
    assert paths == [asked, f"{root}/version", f"{root}/tokenize"]


def test_request_head_reads_whole_bodies():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nab")
        left.sendall(b"cd")
        assert request_head(right).endswith(b"abcd")
