"""Bad input of every kind: reported, never a traceback, never executed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from doctor_evidence import CONFIG, model, write

HOSTILE_LOGS = {
    "empty": b"",
    # Found by fuzz.py: what stands in a message's holes is printed, too.
    "control characters in a reason": b"ValueError: No valid attention backend found for cuda with AttentionSelectorConfig("
    b"head_size=576, dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_sparse=True). Reasons: "
    b"{FLASHMLA_SPARSE: [compute \0\x07capability \x9b31m not supported]}.",
    "zeros": b"\0" * 300_000,
    "binary": bytes(range(256)) * 2000,
    "one line": b"A" * 3_000_000,
    "brackets": b"No valid attention backend found for cuda with AttentionSelectorConfig(head_size=576, "
    + b"[" * 500_000,
    "anchors": b"Workspace is locked but allocation from '" * 20_000,
    "escapes": b"\x1b]0;" * 200_000 + b"\x1b[31m" * 100_000,
    "utf-16 half": "Fehler: \u00fc".encode("utf-16")[:-1],
    "bad utf-8": b"\xc3\x28\xff\xfe\xfa" * 10_000,
    "numbers": b"tensor_parallel_size=" + b"9" * 5000 + b"\nmax_num_batched_tokens=0\nblock_size=-1\n",
    "huge numbers in holes": b"shape '[" + b"9" * 400 + b", 64, 576]' is invalid for input of size 1",
}


@pytest.mark.parametrize("name", HOSTILE_LOGS)
def test_hostile_log(asks, tmp_path, name):
    code, result = asks("--log", write(tmp_path / "log", HOSTILE_LOGS[name]))
    assert code in {0, 1}
    shown = "".join(line for item in result["findings"] for line in item["evidence"])
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown)
    assert "\x1b" not in json.dumps(result)


HOSTILE_CONFIGS = {
    "empty": "", "list": "[]", "number": "1", "text": '"x"', "cut": '{"model_type": "glm', "deep": "[" * 100_000, "nul": "\0\0", "bytes": b"\xff\xfe",
    "nan": json.dumps({**CONFIG, "num_attention_heads": float("nan")}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_config_that_is_none(run, tmp_path, name):
    code, out, err = run("doctor", "--model", write(tmp_path / "config.json", HOSTILE_CONFIGS[name]))
    assert code == (2 if name != "nan" else 0)
    assert name == "nan" or (out == "" and err.count("\n") == 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 10**30},
        {"num_attention_heads": -1},
        {"num_attention_heads": "64"},
        {"num_attention_heads": True},
        {"index_topk": 0},
        {"index_topk": 10**40},
        {"index_topk": None},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": 0},
        {"kv_lora_rank": 7},
        {"qk_rope_head_dim": -64},
        {"indexer_types": "shared"},
        {"indexer_types": ["shared"] * 8},
        {"quantization_config": 5},
        {"model_type": ["x"]},
        {"model_type": "x" * 10_000},
        {"dtype": {"a": 1}},
        {"index_topk_freq": 0},
        {"\x1b[31m": "\x1b[31m"},
    ],
)
def test_config_with_absurd_values(run, tmp_path, changes):
    code, out, _ = run("doctor", "--model", model(tmp_path, **changes), "--pp", 3, "--tp", 2)
    assert code in {0, 1}
    assert "\x1b" not in out
    assert out


def test_paths_that_are_not_there(run, tmp_path):
    assert run("doctor", "--model", tmp_path / "none")[0] == 2
    assert run("doctor", "--vllm-source", tmp_path / "none")[0] == 2
    assert run("doctor", "--vllm-source", "a\0b")[0] == 2
    code, _, err = run("doctor", "--log", tmp_path / "none")
    assert code == 3
    assert err.count("\n") == 1
    assert run("doctor", "--log", tmp_path)[0] == 2
    assert run("doctor", "--log", "a\0b")[0] == 3


@pytest.mark.parametrize("value", ["0", "-1", "x", "1e9", "1.5", "99999999999999", "", "\u0661"])
@pytest.mark.parametrize("flag", ["--tp", "--max-model-len", "--block-size"])
def test_numbers_out_of_range(run, flag, value):
    code, _, err = run("doctor", f"{flag}={value}")
    assert code == 2
    assert "needs a whole number" in err


def test_source_tree_of_rubbish(run, tree):
    rubbish = {
        "platforms/cpu.py": "def (", "platforms/cuda.py": "\0", "v1/attention/backends/registry.py": "(" * 9999,
        "v1/attention/ops/rocm_aiter_mla_sparse.py": "x = '\\ud800'\nclass", "engine/arg_utils.py": "import",
    }  # fmt: skip
    for arch in ("cpu", "sm90", "gfx950"):
        code, out, _ = run("doctor", "--vllm-source", tree(rubbish), "--simulate", arch)
        assert code in {0, 1}
        assert "cannot be parsed" in out


def test_source_is_never_executed(run, tree, tmp_path):
    marker = tmp_path / "ran"
    evil = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef get_attn_backend_cls(cls, b, c):\n    pathlib.Path({str(marker)!r}).touch()\n"
    run(
        "doctor",
        "--vllm-source",
        tree(dict.fromkeys(["platforms/cpu.py", "platforms/cuda.py", "__init__.py", "envs.py"], evil)),
    )
    assert not marker.exists()


def child(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_broken_environment():
    """Neither torch nor an engine nor Transformers can be imported; numpy neither."""
    blocked = "import sys\nfor name in ('torch', 'vllm', 'transformers', 'triton', 'numpy'): sys.modules[name] = None\n"
    done = child(f"{blocked}from sparse_mla.cli.main import main\nsys.exit(main(['doctor']))")
    assert done.returncode == 0, done.stderr
    assert "Checked and well" in done.stdout
    assert "Traceback" not in done.stderr


def test_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom sparse_mla.cli.main import main\nmain(['doctor', '-q'])\n"
        "print([name for name in ('torch', 'vllm', 'transformers', 'triton', 'numpy') if name in sys.modules])"
    )
    assert child(code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    "death", ["import os; os._exit(7)", "raise SystemExit(3)", "import no_such_module", "raise RuntimeError('broken')"]
)
def test_engine_that_dies_on_import(tmp_path, death):
    """A broken installation in front of the real one: metadata is there, importing it kills."""
    for folder in ("vllm/platforms", "vllm/v1/attention", "vllm-0.77.0.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "vllm" / "__init__.py", death + "\n")
    write(tmp_path / "vllm" / "platforms" / "cuda.py", "def _get_backend_priorities(use_mla):\n    return []\n")
    write(tmp_path / "vllm-0.77.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.77.0\n")
    code = "import sys\nfrom sparse_mla.cli.main import main\nsys.exit(main(['doctor', '--simulate', 'sm80']))"
    done = child(code, PYTHONPATH=str(tmp_path))
    assert "Traceback" not in done.stderr
    assert done.returncode in {0, 1}
    assert "vLLM 0.77.0" in done.stdout
    assert "could not be run" in done.stdout


def test_no_engine_at_all(monkeypatch, asks):
    monkeypatch.setattr("sparse_mla.engine_source.tree.installed", lambda: None)
    code, result = asks()
    assert code == 0
    assert result["source"] is None
    assert any("no vLLM was found" in note for note in result["notes"])
