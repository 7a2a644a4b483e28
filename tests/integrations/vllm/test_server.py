"""vLLM's OpenAI server under several clients: streamed or not, alone or together, it says what an offline engine says.

As in ``test_engine_exact``, the matrix products of vLLM's own layers have one shape, so that nothing may differ but the
last bits of a logprob.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from sparse_mla.testing.tiny_model import write_tiny_model
from sparse_mla.testing.words import VOCABULARY, tokenizer_files

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LAST_BITS = 1e-5
CHUNK = 128
BLOCK = 16
TOKENS = 12
LENGTHS = (1, 17, 64, 65, 130, 400, 401, 90)
SEEDS = (None, 1, None, 2, None, 3, None, 4)  # None: greedy


@dataclass(frozen=True)
class Said:
    """An answer: text, token ids and the logprob of each."""

    text: str
    ids: list[int]
    logprobs: list[float]
    cached: int


def prompts() -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(3, len(VOCABULARY)) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    write_tiny_model(folder, vocab_size=len(VOCABULARY))
    for name, content in tokenizer_files().items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def offline(run_jobs, model, server):
    """Answers of an engine in one process, one prompt after the other, while the server starts."""
    job = {"model": str(model), "engine": {"max_num_batched_tokens": 512}, "tokens": TOKENS, "logprobs": False}
    alone = [[prompt] for prompt in prompts()]
    ((answers,), _) = run_jobs([{**job, "batches": alone, "seeds": SEEDS}], ONE_SHAPE="1")
    assert "error" not in answers, answers
    return [answer for (answer,) in answers["batches"]]


@pytest.fixture(scope="module")
def server(vllm_root, model):
    """A server that is starting: its process, its address and its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).with_name("one_shape_server.py")), "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", str(CHUNK)]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    log = model.with_name("log")
    with log.open("w") as out:
        child = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        try:
            yield child, f"http://127.0.0.1:{port}/v1", log
        finally:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


@pytest.fixture(scope="module")
def client(server, offline):
    from openai import OpenAI

    child, url, log = server
    until = time.monotonic() + 600
    while True:
        try:
            urllib.request.urlopen(f"{url}/models", timeout=2)  # noqa: S310 - our own server
            break
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            assert child.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.3)
    with OpenAI(base_url=url, api_key="none", timeout=300, max_retries=0) as opened:
        yield opened


def ask(client, prompt: list[int], seed: int | None, *, stream: bool) -> Said:
    answer = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0.0 if seed is None else 0.8,
        seed=seed,
        logprobs=1,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    parts = list(answer) if stream else [answer]
    choices = [part.choices[0] for part in parts if part.choices]
    usage = next(part.usage for part in reversed(parts) if part.usage)
    assert usage.prompt_tokens == len(prompt)
    return Said(
        text="".join(choice.text for choice in choices),
        ids=[token for choice in choices for token in choice.token_ids or []],
        logprobs=[one for choice in choices if choice.logprobs for one in choice.logprobs.token_logprobs],
        cached=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0,
    )


@pytest.fixture(scope="module")
def alone(client):
    """Each request with the server to itself, not streamed."""
    return [ask(client, prompt, seed, stream=False) for prompt, seed in zip(prompts(), SEEDS, strict=True)]


@pytest.fixture(scope="module")
def together(client, alone):
    """All requests at once from as many clients, streamed, twice."""
    work = [*zip(prompts(), SEEDS, strict=True)] * 2
    with ThreadPoolExecutor(len(LENGTHS)) as clients:
        answers = list(clients.map(lambda item: ask(client, *item, stream=True), work))
    return answers[: len(LENGTHS)], answers[len(LENGTHS) :]


def test_the_server_says_what_an_offline_engine_says(alone, offline):
    for said, answer in zip(alone, offline, strict=True):
        assert said.ids == answer["tokens"]
        assert said.logprobs == pytest.approx(answer["logprobs"], abs=LAST_BITS, rel=0)


def test_company_and_streaming_change_nothing(together, alone):
    for answers in together:
        for streamed, whole in zip(answers, alone, strict=True):
            assert (streamed.ids, streamed.text) == (whole.ids, whole.text)
            assert len(streamed.ids) == TOKENS
            assert streamed.logprobs == pytest.approx(whole.logprobs, abs=LAST_BITS, rel=0)


def test_prompts_were_cold_then_warm(together, alone):
    assert {said.cached for said in alone} == {0}
    whole_blocks = [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert all([said.cached for said in answers] == whole_blocks for answers in together)


def test_greedy_and_sampled_are_two_things(client, alone):
    """Else seeds would have tested nothing."""
    sampled = [(prompt, said) for prompt, seed, said in zip(prompts(), SEEDS, alone, strict=True) if seed is not None]
    assert all(ask(client, prompt, None, stream=False).ids != said.ids for prompt, said in sampled)
