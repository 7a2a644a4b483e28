"""``sparse-mla verify`` as a user meets it: results on stdout, one clear line for bad input, exit codes that mean it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest

from sparse_mla.cli.main import main
from sparse_mla.testing.faults import FAULTS
from sparse_mla.testing.tiny_model import tiny_config
from sparse_mla.verify import engine, memory

SMALL = ["verify", "--lengths", "200", "--chunk-tokens", "64"]


@pytest.fixture
def model(tmp_path):
    """Geometry of a tiny model, to keep runs short."""
    config = tiny_config(num_attention_heads=2, num_key_value_heads=2, index_n_heads=2, index_topk=32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ["--model", str(tmp_path)]


def test_json_and_junit(model, tmp_path, capsys):
    junit = tmp_path / "out.xml"
    assert main([*SMALL, *model, "--json", "--junit", str(junit)]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == "sparse-mla/verify/1"
    assert document["ok"] is True
    assert document["facts"]["index_topk"] == 32
    assert "[1/" in err
    written = ET.parse(junit)  # noqa: S314 (our own)
    assert len(written.findall(".//testcase")) == len(document["checks"])
    assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []


def test_people_get_tables(model, capsys):
    assert main([*SMALL, *model]) == 0
    out, _ = capsys.readouterr()
    assert "200 tokens, tied" in out
    assert "64 tokens, fresh objects" in " ".join(out.split())
    assert "not checked: engine (" in out
    assert "verified, " in out


def test_quiet_is_the_exit_code_alone(model, capsys):
    assert main([*SMALL, *model, "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_fault_is_exit_1_and_a_line(model, capsys):
    with next(fault for fault in FAULTS if fault.name == "stale-gather").inject():
        assert main([*SMALL, *model]) == 1
    out, _ = capsys.readouterr()
    assert "FAULT operators.select.plans: 200 tokens" in out
    assert "DIFFERS" in out
    assert "checks failed" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "--lengths: needs whole numbers"),
        (["--lengths", "-3"], "--lengths: needs whole numbers"),
        (["--lengths", "2147483648"], "--lengths: needs whole numbers"),
        (["--lengths", "9" * 5000], "--lengths: needs whole numbers"),
        (["--lengths", "1e5"], "--lengths: needs whole numbers"),
        (["--lengths", "10,,20"], "--lengths: needs whole numbers"),
        (["--lengths", "٣٣"], "--lengths: needs whole numbers"),
        (["--chunk-tokens", "0"], "--chunk-tokens: needs whole numbers"),
        (["--seed", "-1"], "--seed: needs"),
        (["--backend", "nope", "--lengths", "9"], "unknown backend"),
        (["--device", "cuda:99", "--lengths", "9"], "device cuda:99"),
        (["--device", "nothing", "--lengths", "9"], "--device"),
        (["--model", "/nowhere", "--lengths", "9"], "cannot read /nowhere"),
        (["--tp", "2", "--lengths", "9"], "--tp: needs --model"),
        (["--junit", "/nowhere/x.xml"], "--junit: needs a file name"),
        (["--engine", "vllm"], "--engine: needs --model"),
        (["--engine", "vllm", "--model", "tiny", "--device", "cuda"], "--device: needs the operator target"),
        (["--engine", "vllm", "--model", "tiny", "--device", "cpu"], "--device: needs the operator target"),
        (["--engine", "vllm", "--model", "tiny", "--tp", "1"], "--tp: needs the operator target"),
        (["--engine", "vllm", "--model", "tiny", "--all-rows"], "--all-rows: needs the operator target"),
        (["--model", "retrieval"], "--model retrieval: needs --engine vllm beside it"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, message, capsys):
    assert main(["verify", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_length_that_does_not_fit_is_exit_3(capsys):
    assert main(["verify", "--lengths", "2000000000"]) == 3
    _, err = capsys.readouterr()
    assert "too little memory for 2,000,000,000 tokens" in err
    assert len(err.splitlines()) == 1


def engine_line(capsys, *arguments):
    code = main(["verify", "--engine", "vllm", "--model", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return code, err


def test_no_engine_is_exit_3_and_operators_say_so(monkeypatch, model, capsys):
    monkeypatch.setattr(engine, "find_spec", lambda _: None)
    code, err = engine_line(capsys, "tiny")
    assert code == 3
    assert "vLLM is not installed: needs vllm" in err
    assert main([*SMALL, *model]) == 0
    assert "not checked: engine (vLLM is not installed" in " ".join(capsys.readouterr().out.split())


def test_an_unsupported_engine_is_exit_3(monkeypatch, capsys):
    monkeypatch.setattr(engine, "find_spec", lambda _: object())
    monkeypatch.setattr(engine.metadata, "packages_distributions", lambda: {"vllm": ["vllm"]})
    monkeypatch.setattr(engine.metadata, "version", lambda _: "0.19.1+cu130")
    code, err = engine_line(capsys, "tiny")
    assert code == 3
    assert "vllm is not supported: needs" in err
    assert "got 0.19.1+cu130" in err


@pytest.fixture
def some_engine(monkeypatch):
    monkeypatch.setattr(engine, "installed_engine", lambda _: engine.Engine("vllm", "0.32.0"))


@pytest.mark.usefixtures("some_engine")
def test_engine_models_are_judged_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "cache"))
    assert engine_line(capsys, str(tmp_path))[0] == 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "Not DSA" in engine_line(capsys, str(tmp_path))[1]
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    code, err = engine_line(capsys, str(tmp_path))
    assert (code, "not a safetensors file" in err) == (2, True)
    assert engine_line(capsys, "tiny", "--lengths", "900000")[0] == 2
    assert engine_line(capsys, "tiny", "--lengths", "900")[0] == 2
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 1 << 20)
    code, err = engine_line(capsys, "tiny")
    assert (code, "too little memory" in err) == (3, True)


def test_interrupting_is_quiet():
    command = [sys.executable, "-m", "sparse_mla", "verify", "--lengths", "20000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ, text=True)
    for line in child.stderr:
        if line.startswith("[1/"):
            break
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "sparse-mla verify: interrupted"
