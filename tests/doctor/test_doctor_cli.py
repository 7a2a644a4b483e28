from __future__ import annotations

import json

import pytest
from doctor_evidence import CONFIG, model, write

from sparse_mla.device import KNOWN
from sparse_mla.doctor.knowledge import load
from sparse_mla.engine_source import tree as source

STARTUP = """\
(APIServer pid=10) INFO 09-01 10:00:00 [api_server.py:1] vLLM API server version 0.32.0
(EngineCore pid=11) INFO 09-01 10:00:01 [core.py:2] Initializing a V1 LLM engine (v0.32.0) with config: tensor_parallel_size=4, max_seq_len=65536
(EngineCore pid=11) ERROR 09-01 10:00:02 [core.py:3] NotImplementedError: Sparse Attention is not supported on CPU.
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


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


def test_faulty_code_does_not_explain_an_error_in_the_log(asks, tmp_path):
    """The engine's CPU platform refuses sparse models, but that is not what this log died of."""
    log = write(tmp_path / "log", "RuntimeError: something nobody has seen\n")
    _, result = asks("--log", log, "--vllm-source", source.installed().root.parent)
    assert result["verdict"] == "unknown"
    assert ("sparse-refused-on-cpu", "read") in [(item["id"], item["standing"]) for item in result["findings"]]


def test_a_plugin_that_vllm_is_told_not_to_load_is_named(asks, tmp_path, monkeypatch):
    log = write(tmp_path / "log", STARTUP)
    monkeypatch.setenv("VLLM_PLUGINS", "other,sparse_mla")
    _, loaded = asks("--log", log)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    _, excluded = asks("--log", log)
    named = [[finding["id"] for finding in result["findings"]] for result in (loaded, excluded)]
    assert "plugin-excluded" not in named[0]
    assert "plugin-excluded" in named[1]
