"""Against vLLM's OpenAI server on this CPU, with the model that repeats planted facts through sparse attention."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_proxy import spoiling

from sparse_mla.testing.retrieval import write_retrieval_model
from sparse_mla.verify.endpoint.outcome import read_book

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="not checked: vLLM is not installed"),
]

CHUNK = 256
INDEX_TOPK = 64
LENGTH = 700  # three chunks, and eleven times index_topk
FACTS = 6  # in a prompt: each is asked for in a request of its own


@dataclass(frozen=True)
class Engine:
    address: str
    options: tuple[str, ...]
    fault: Path

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    write_retrieval_model(folder / "model", index_topk=INDEX_TOPK)
    style = json.loads((folder / "model" / "endpoint-style.json").read_text())
    (folder / "style.json").write_text(json.dumps({**style, "names": style["names"][:FACTS]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("engine_server.py"))]
    command += ["--model", str(folder / "model"), "--served-model-name", "retrieval", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
    command += [
        "--max-num-batched-tokens",
        str(CHUNK),
        "--max-num-seqs",
        "8",
        "--kv-cache-memory-bytes",
        str(256 << 20),
    ]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "SPARSE_MLA_VLLM": "always", "FAULT_SWITCH": str(folder / "fault")}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    log = (folder / "log").open("w")
    child = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/v1/models", child, folder / "log")
        options = ("--style", str(folder / "style.json"), "--chunk-tokens", str(CHUNK))
        yield Engine(
            f"127.0.0.1:{port}", (*options, "--index-topk", str(INDEX_TOPK), "--answer-tokens", "8"), folder / "fault"
        )
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        log.close()


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
    engine.fault.touch()
    try:
        result = verify("--endpoint", engine.url, *engine.options, "--concurrency", "0", lengths=str(LENGTH))
    finally:
        engine.fault.unlink()
    assert result.code == 1, result.err
    assert result.verdicts[-1] == "endpoint.chunk-count"
    verdict = result.json["facts"]["verdicts"][-1]
    assert "where the third chunk of 256 tokens begins" in verdict["statement"]
    assert any("total length" in text for text in verdict["excludes"])
    edge = result.json["facts"]["first_failing"]
    assert edge["passes"] <= 2 * CHUNK < edge["fails"] <= 2 * CHUNK + 64


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("429", "http-429"),
        ("500", "http-500"),
        ("hang", "timeout"),
        ("garbage", "garbage"),
        ("flood", "too-large"),
        ("cut", "cut"),
    ],
)
def test_an_answer_spoilt_on_its_way_is_no_verdict_on_the_engine(engine, verify, how, kind):
    with spoiling(engine.address, how) as url:
        patience = ("--retries", "0", "--timeout", "4" if how == "hang" else "300")
        result = verify("--endpoint", url, *engine.options, *patience, "--concurrency", "0", lengths=str(LENGTH))
    assert result.code == 3, result.err
    assert {one["failure"] for one in result.json["facts"]["unanswered"]} == {kind}
    assert result.json["findings"] == []


def test_the_official_client_gets_the_same_answers(engine, verify, tmp_path):
    from openai import OpenAI

    saved = tmp_path / "run.json"
    seed = ("--seed", "7", "--concurrency", "0", "--save", str(saved))
    with spoiling(engine.address, "pass") as url:
        recorded: list[dict] = []
        assert verify("--endpoint", f"{url}/v1", *engine.options, *seed, lengths="500").code == 0
        outcome = read_book("--save", saved).outcomes["0:cold/500/0"]
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
        assert [model.id for model in client.models.list()] == ["retrieval"]
        for prompt in prompts_of(engine, url, seed=7, length=500):
            answer = client.completions.create(
                model="retrieval",
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                stop=["."],
                extra_body={"return_token_ids": True},
            )
            recorded.append(answer.to_dict())
    assert all(answer["usage"]["prompt_tokens"] == 500 for answer in recorded)
    tokens = [str(token) for answer in recorded for token in answer["choices"][0]["token_ids"]]
    assert tuple(tokens) == outcome.tokens
    assert "\n".join(answer["choices"][0]["text"] for answer in recorded) == outcome.text


def prompts_of(engine, url, *, seed, length):
    """The token ids that verify sent for a cold probe, composed again."""
    from sparse_mla.verify.endpoint.api import Api
    from sparse_mla.verify.endpoint.meters import IdMeter
    from sparse_mla.verify.endpoint.outcome import Probe
    from sparse_mla.verify.endpoint.prompts import Composer
    from sparse_mla.verify.endpoint.session import recipe
    from sparse_mla.verify.endpoint.style import load
    from sparse_mla.verify.endpoint.transport import transport

    api = Api(transport(url), timeout=60, retries=0)
    api.identify(None)
    style = load(engine.options[1])
    meter = IdMeter(lambda text, special: api.tokenize(text, special=special), style)
    composer = Composer(style, meter, seed=seed, index_topk=INDEX_TOPK, chunk_tokens=CHUNK)
    return [prompt.content for prompt in composer.prompts(recipe(Probe(state="cold", length=length)))]
