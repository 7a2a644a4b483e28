from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sparse_mla.cli.main import main
from sparse_mla.device import KNOWN
from sparse_mla.doctor.knowledge import load

CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
STARTUP = """\
(APIServer pid=10) INFO 09-01 10:00:00 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=11) INFO 09-01 10:00:01 [core.py:2] Initializing a V1 LLM engine (v0.32.0) with config: tensor_parallel_size=4, max_seq_len=65536
(EngineCore pid=11) ERROR 09-01 10:00:02 [core.py:3] NotImplementedError: Sparse Attention is not supported on CPU.
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command in this process: (exit code, stdout, stderr). No traceback may ever appear."""

    def call(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", stdin)
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def asks(run):
    def call(*arguments):
        code, out, _ = run("doctor", "--json", *arguments)
        return code, json.loads(out)

    return call


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def model(tmp_path, **changes):
    return write(tmp_path / "config.json", json.dumps({**CONFIG, **changes}))


def test_bare_machine(asks):
    code, result = asks()
    assert code == 0
    assert result["schema"] == "sparse-mla/doctor/1"
    assert result["ok"] is True
    assert result["findings"] == [] or all(item["standing"] == "possible" for item in result["findings"])
    assert result["packages"]["vllm"] == "0.32.0"
    assert any("CPU platform refuses" in text for text in result["checked_well"])
    assert result["source"]["origin"] == "installed"
    assert [stage["backend"] for stage in result["sparse_mla"]["stages"]] == ["eager"] * 3


def test_every_finding_has_the_stable_keys(asks, tmp_path):
    _, result = asks("--log", write(tmp_path / "log", STARTUP))
    for finding in result["findings"]:
        assert {"id", "severity", "evidence", "fix"} <= set(finding)
        assert finding["id"] in {defect.id for defect in load()}


def test_log_names_the_cause_and_not_its_consequence(asks, tmp_path):
    code, result = asks("--log", write(tmp_path / "log", STARTUP))
    assert code == 1
    first = result["findings"][0]
    assert (first["id"], first["standing"]) == ("sparse-refused-on-cpu", "seen")
    assert first["evidence"][0].startswith("log line 3 [EngineCore pid=11]")
    assert result["facts"]["tp"] == {"value": 4, "from": "log"}
    assert result["facts"]["max_model_len"] == {"value": 65536, "from": "log"}


def test_flag_beats_log(asks, tmp_path):
    _, result = asks("--log", write(tmp_path / "log", STARTUP), "--tp", 2)
    assert result["facts"]["tp"] == {"value": 2, "from": "flag"}


def test_log_of_another_version_is_not_judged_by_this_source(asks, tmp_path):
    log = write(tmp_path / "log", "vLLM API server version 0.23.0\n" + STARTUP.replace("0.32.0", "0.23.0"))
    _, result = asks("--log", log)
    assert any("0.23.0" in note and "not used as evidence" in note for note in result["notes"])


def test_healthy_log(asks, tmp_path):
    code, result = asks("--log", write(tmp_path / "log", "INFO all is well\n" * 50))
    assert (code, result["verdict"]) == (0, "healthy")


def test_unknown_error_is_called_unknown(asks, run, tmp_path):
    log = write(tmp_path / "log", "INFO start\nRuntimeError: something nobody has seen\n")
    code, result = asks("--log", log)
    assert (code, result["verdict"], result["ok"]) == (1, "unknown", False)
    (finding,) = [item for item in result["findings"] if item["standing"] != "possible"]
    assert finding["id"] == "unknown"
    assert finding["evidence"] == ["log line 2: RuntimeError: something nobody has seen"]
    _, out, _ = run("doctor", "--log", log)
    assert "Cause: unknown" in out


def test_log_from_standard_input(run, tmp_path):
    with write(tmp_path / "log", STARTUP).open() as stream:
        code, out, _ = run("doctor", "--log", "-", stdin=stream)
    assert code == 1
    assert "sparse-refused-on-cpu" in out


@pytest.mark.parametrize("arch", KNOWN)
def test_simulate(asks, arch):
    code, result = asks("--simulate", arch, "--static")
    assert code in {0, 1}
    assert result["engine_candidates"]["arch"] == arch
    assert "not run" in result["engine_candidates"]["how"]
    assert result["sparse_mla"]["arch"] == arch
    assert len(result["sparse_mla"]["stages"]) == 3
    ids = [finding["id"] for finding in result["findings"] if finding["standing"] != "possible"]
    assert ("no-sparse-backend" in ids) == (arch in {"sm80", "sm86", "sm89"})
    assert (result["long_prefill"] is None) == (not arch.startswith("gfx"))


def test_simulate_does_not_know_other_devices(run):
    code, _, err = run("doctor", "--simulate", "sm70")
    assert code == 2
    assert "sm80" in err


def test_model_is_read(asks, tmp_path):
    _, result = asks("--model", model(tmp_path), "--tp", 4)
    assert result["facts"]["heads_per_rank"] == {"value": 16, "from": "model"}
    _, result = asks("--model", tmp_path, "--tp", 4)
    assert result["facts"]["dsa"] == {"value": True, "from": "model"}


def test_missing_topk_is_said_to_be_filled_in(asks, tmp_path):
    path = write(
        tmp_path / "config.json", json.dumps({key: value for key, value in CONFIG.items() if key != "index_topk"})
    )
    _, result = asks("--model", path)
    assert result["facts"]["index_topk"]["value"] == 2048
    assert any("index_topk" in note for note in result["notes"])


def test_pipeline_stage_on_a_shared_layer(asks, tmp_path):
    path = model(tmp_path, indexer_types=["full", "shared"] * 4)
    _, two = asks("--model", path, "--pp", 2)
    assert two["facts"]["stage_starts_shared"]["value"] is False
    _, eight = asks("--model", path, "--pp", 8)
    assert eight["facts"]["stage_starts_shared"]["value"] is True
    assert "pipeline-stage-starts-on-shared-layer" in [finding["id"] for finding in eight["findings"]]


def test_dense_model_gets_no_sparse_advice(asks, tmp_path):
    path = write(tmp_path / "config.json", json.dumps({"model_type": "llama", "num_attention_heads": 8}))
    _, result = asks("--model", path, "--simulate", "gfx950", "--static")
    assert result["long_prefill"] is None
    assert result["findings"] == []


def test_fix_prints_commands_and_runs_nothing(run, tmp_path):
    marker = tmp_path / "ran"
    code, out, _ = run("doctor", "--fix", "--simulate", "sm80", "--static", "--model", model(tmp_path))
    assert code == 1
    assert all(line.startswith(("#", "pip install", "SPARSE_MLA_VLLM=always")) for line in out.strip().splitlines())
    assert str(tmp_path) in out
    code, out, _ = run("doctor", "--fix")
    assert out == "# nothing to fix was found\n"
    assert not marker.exists()


def test_report_is_a_block_for_pasting(run, tmp_path):
    log = write(tmp_path / "log", "RuntimeError: ``` boom \x1b[31m\n")
    _, out, _ = run("doctor", "--report", "--log", log)
    assert out.startswith("### sparse-mla doctor")
    assert out.count("```") % 2 == 0
    assert "\x1b" not in out
    assert "vllm 0.32.0" in out


def test_quiet_prints_nothing(run):
    assert run("doctor", "-q") == (0, "", "")


def test_no_color(run, monkeypatch, tmp_path):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("doctor", "--log", write(tmp_path / "log", STARTUP))[1]


def test_no_option_is_suggested_that_this_version_lacks(asks, tree):
    root = tree({"engine/arg_utils.py": "x = '--max-model-len'\n"}, version="0.20.2")
    _, result = asks("--vllm-source", root, "--simulate", "gfx950", "--max-num-batched-tokens", 8192)
    words = [
        word
        for finding in result["findings"]
        for fix in finding["fix"]
        for word in fix["command"].split()
        if word.startswith("--")
    ]
    assert set(words) <= {"--max-model-len"}


def test_plugin_variable_with_a_bad_value_is_told(asks, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "sometimes")
    code, result = asks()
    assert code in {0, 1}
    assert any("SPARSE_MLA_VLLM" in note for note in result["notes"])


def test_plugin_switched_off_covers_nothing(asks, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "off")
    code, result = asks()
    assert code == 1
    assert result["findings"][0]["id"] == "sparse-refused-on-cpu"


# Bad input


HOSTILE_LOGS = {
    "empty": b"",
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
    monkeypatch.setattr("sparse_mla.doctor.source.installed", lambda: None)
    code, result = asks()
    assert code == 0
    assert result["source"] is None
    assert any("no vLLM was found" in note for note in result["notes"])


# explain


@pytest.mark.parametrize("defect", load(), ids=lambda defect: defect.id)
def test_explain_every_entry(run, defect):
    code, out, _ = run("explain", defect.id)
    assert code == 0
    assert defect.title in out
    assert all(reference in out for reference in defect.references)


def test_explain_lists_and_refuses(run):
    code, out, _ = run("explain")
    assert code == 0
    assert all(defect.id in out for defect in load())
    code, out, err = run("explain", "no-such-id\x1b[31m")
    assert code == 2
    assert out == ""
    assert "\x1b" not in err
    assert run("explain", "-q") == (0, "", "")


def test_explain_as_data(run):
    _, out, _ = run("explain", "--json", "plan-cached-under-small-key")
    entry = json.loads(out)
    assert entry["schema"] == "sparse-mla/explain/1"
    assert entry["defect"]["threshold"] == "2 * max_num_batched_tokens + 1"
    _, out, _ = run("explain", "--json")
    assert len(json.loads(out)["defects"]) == len(load())
