"""Against vLLM's OpenAI server on this CPU, with the model that repeats planted facts through sparse attention."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_proxy import LONG, spoiling

from sparse_mla.testing.retrieval import write_retrieval_model
from sparse_mla.verify.endpoint.outcome import read_book

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed"),
]

CHUNK = 256
OTHER_CHUNK = 384
INDEX_TOPK = 64
LENGTH = 700  # three chunks, and eleven times index_topk
LONGER = 900  # three chunks of the other server
FACTS = 4  # in a prompt: each is asked for in a request of its own
CLIENTS_OWN = {"return_token_ids", "chat_template_kwargs"}  # of vLLM, not of OpenAI


@dataclass(frozen=True)
class Engine:
    address: str
    options: tuple[str, ...]
    fault: Path
    child: subprocess.Popen

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def freeze_and_die(self) -> None:
        """The whole server stops where it stands, and is killed while a request waits for it."""
        os.killpg(self.child.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.killpg, (self.child.pid, signal.SIGKILL)).start()


@contextmanager
def started(folder: Path, chunk: int):
    """A server of the model in ``folder``, which is not up yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("engine_server.py"))]
    command += ["--model", str(folder / "model"), "--served-model-name", "retrieval", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
    command += ["--max-num-batched-tokens", str(chunk), "--max-num-seqs", "8"]
    command += ["--kv-cache-memory-bytes", str(256 << 20)]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "SPARSE_MLA_VLLM": "always", "FAULT_SWITCH": str(folder / "fault")}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    options = ("--style", str(folder / "style.json"), "--index-topk", str(INDEX_TOPK), "--answer-tokens", "8")
    with (folder / f"log-{chunk}").open("w") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            yield Engine(f"127.0.0.1:{port}", (*options, "--chunk-tokens", str(chunk)), folder / "fault", child)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two servers of the same model, which differ in their chunks."""
    folder = tmp_path_factory.mktemp("retrieval")
    write_retrieval_model(folder / "model", index_topk=INDEX_TOPK)
    style = json.loads((folder / "model" / "endpoint-style.json").read_text())
    (folder / "style.json").write_text(json.dumps({**style, "names": style["names"][:FACTS]}))
    with ExitStack() as stack:
        both = [stack.enter_context(started(folder, chunk)) for chunk in (CHUNK, OTHER_CHUNK)]
        for engine, chunk in zip(both, (CHUNK, OTHER_CHUNK), strict=True):
            wait_for(f"{engine.url}/v1/models", engine.child, folder / f"log-{chunk}")
        yield both


@pytest.fixture
def engine(engines):
    return engines[0]


@contextmanager
def faulty(engine, kind):
    engine.fault.write_text(kind)
    try:
        yield
    finally:
        engine.fault.unlink()


def wait_for(url: str, child: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + 600
    while time.monotonic() < until:
        assert child.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url, timeout=2)  # noqa: S310 - our own server
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
        else:
            return
    raise AssertionError(log.read_text()[-4000:])


def test_a_healthy_engine_is_verified_through_sparse_attention(engine, verify, tmp_path):
    saved = tmp_path / "run.json"
    command = [*engine.options, "--concurrency", "2", "--save", str(saved)]
    result = verify("--endpoint", engine.url, *command, lengths=str(LENGTH))
    assert result.code == 0, result.err
    report = result.json
    assert report["facts"]["servers"][0]["mode"] == "completions, token ids"
    assert report["facts"]["servers"][0]["token_kind"] == "ids"  # noqa: S105
    cases = {case["probe"]: case for case in report["cases"]}
    assert cases[f"0:cold/{LENGTH}/0"]["prompt_tokens"] == LENGTH
    assert len(cases[f"0:cold/{LENGTH}/0"]["facts"]) == FACTS
    assert cases[f"0:cold/{LENGTH}/0"]["cached_tokens"] == 0
    assert cases[f"0:repeat/{LENGTH}/0"]["cached_tokens"] > LENGTH // 2
    assert report["facts"]["not_reproducible"] == []
    outcomes = read_book("--save", saved).outcomes
    assert outcomes[f"0:cold/{LENGTH}/0"].logprobs
    assert outcomes[f"0:cold/{LENGTH}/0"].tokens == outcomes[f"0:repeat/{LENGTH}/0"].tokens


def test_chat_counts_its_template_and_is_exact_too(engine, verify):
    result = verify("--endpoint", engine.url, *engine.options, "--api", "chat", "--concurrency", "0", lengths="401")
    assert result.code == 0, result.err
    assert result.json["facts"]["servers"][0]["mode"] == "chat, thinking off"
    assert result.json["facts"]["servers"][0]["token_kind"] == "ids"  # noqa: S105
    cases = {case["probe"]: case for case in result.json["cases"]}
    assert cases["0:cold/401/0"]["prompt_tokens"] == 401


def test_a_fault_from_the_third_chunk_on_is_caught_and_localised(engine, verify):
    with faulty(engine, "third chunk"):
        result = verify("--endpoint", engine.url, *engine.options, "--concurrency", "0", lengths=str(LENGTH))
    assert result.code == 1, result.err
    assert result.verdicts[-1] == "endpoint.chunk-count"
    verdict = result.json["facts"]["verdicts"][-1]
    assert "where the third chunk of 256 tokens begins" in verdict["statement"]
    assert any("total length" in text for text in verdict["excludes"])
    edge = result.json["facts"]["first_failing"]
    assert edge["passes"] <= 2 * CHUNK < edge["fails"] <= 2 * CHUNK + 64


@pytest.mark.parametrize(
    ("fault", "verdict", "statement"),
    [
        ("third chunk", "endpoint.chunk-count", "from the third chunk on, on both endpoints"),
        ("length", "endpoint.length", "The failure follows the length: it begins between"),
    ],
)
def test_two_servers_of_other_chunk_sizes_tell_chunk_count_from_length(engines, verify, fault, verdict, statement):
    first, second = engines
    both = ("--endpoint", first.url, "--endpoint", second.url, *first.options)
    chunks = ("--chunk-tokens", f"{CHUNK},{OTHER_CHUNK}", "--concurrency", "0")
    with faulty(first, fault):
        result = verify(*both, *chunks, lengths=f"{LENGTH},{LONGER}")
    assert result.code == 1, result.err
    assert result.json["facts"]["complete"]
    assert result.verdicts[-1] == verdict
    assert statement in result.json["facts"]["verdicts"][-1]["statement"]


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        (("stream", "shorter", "garbage"), ["garbage", "truncated", "garbage"]),
        (("cut", "flood", "endless"), ["cut", "too-large", "too-large"]),
        (("drip", "429", "500"), ["timeout", "http-429", "http-500"]),
        (("hang", "die"), ["timeout", "cut", "unreachable"]),
    ],
)
def test_an_answer_spoilt_on_its_way_is_no_verdict_on_the_engine(engine, verify, how, kinds):
    patience = ("--retries", "0", "--timeout", "5" if kinds[0] == "timeout" else "300")
    with spoiling(engine.address, *how) as url:
        result = verify("--endpoint", url, *engine.options, *patience, "--concurrency", "0", lengths=str(LENGTH))
    assert result.code == 3, result.err
    assert [one["failure"] for one in result.json["facts"]["unanswered"]] == kinds
    assert result.json["findings"] == []
    assert "Traceback" not in result.err


def test_a_limit_that_is_a_lie_is_called_one(engine, verify):
    with spoiling(engine.address, limit=1 << 20) as url:
        result = verify("--endpoint", url, *engine.options, "--concurrency", "0", lengths="5000")
    assert result.code == 3, result.err
    assert {one["failure"] for one in result.json["facts"]["unanswered"]} == {"http-400"}
    assert any("although it tells a limit of 1,048,576 tokens" in text for text in result.json["not_proved"])


def test_a_busy_server_is_asked_again_and_verified(engine, verify):
    with spoiling(engine.address, "cut", "429", "500") as url:
        patient = ("--retries", "3", "--concurrency", "0")
        result = verify("--endpoint", url, *engine.options, *patient, lengths="500")
    assert result.code == 0, result.err
    assert result.json["facts"]["unanswered"] == []


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_official_client_gets_the_same_answers(engine, verify, api):
    from openai import OpenAI

    kept: list[tuple[str, dict, dict]] = []
    with spoiling(engine.address, kept=kept) as url:
        ours = verify("--endpoint", f"{url}/v1", *engine.options, "--api", api, "--concurrency", "0", lengths="500")
        assert ours.code == 0, ours.err
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        assert [model.id for model in client.models.list()] == ["retrieval"]
        ask = client.chat.completions.create if api == "chat" else client.completions.create
        asked = [one for one in kept if one[0].endswith("completions") and len(json.dumps(one[1])) > LONG][:FACTS]
        theirs = [
            ask(
                **{name: value for name, value in body.items() if name not in CLIENTS_OWN},
                extra_body={name: body[name] for name in CLIENTS_OWN & set(body)},
            ).to_dict()
            for _, body, _ in asked
        ]
    assert len(asked) == FACTS
    for (_, _, ours), other in zip(asked, theirs, strict=True):
        assert other["usage"]["prompt_tokens"] == ours["usage"]["prompt_tokens"] == 500
        for answer in (ours, other):  # a cached prompt is computed in other pieces, and the last bits may differ
            logprobs = answer["choices"][0].pop("logprobs")
            answer["logprobs"] = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs["content"]]
        mine, same = ours["choices"][0], other["choices"][0]
        assert {name: mine[name] for name in same if mine[name] is not None} == {
            name: value for name, value in same.items() if value is not None
        }
        assert other["logprobs"] == pytest.approx(ours["logprobs"], abs=1e-4)


def test_a_server_killed_while_it_computes_leaves_a_partial_report(engines, verify):
    """The last test: it ends the second server."""
    dying = engines[1]
    with spoiling(dying.address, "pass", dying.freeze_and_die) as url:
        lengths = f"{LENGTH},{LONGER}"
        result = verify("--endpoint", url, *dying.options, "--retries", "0", "--concurrency", "0", lengths=lengths)
    assert result.code == 3, result.err
    assert {one["failure"] for one in result.json["facts"]["unanswered"]} == {"cut"}
    assert "3 requests in a row failed" in result.json["facts"]["stopped"]
    assert result.json["findings"] == []
    assert result.json["checks"]
