"""What a log tells beside its errors: engine, model, device, settings, as each engine prints them and as people paste them."""

from __future__ import annotations

import io

import pytest
from doctor_evidence import leads_to, model, write

from sparse_mla.doctor.log_facts import LOG_FACTS, from_log
from sparse_mla.doctor.logs import scan


def told(log):
    return from_log(scan(io.BytesIO(log.encode()), {}, LOG_FACTS))


@pytest.mark.parametrize(
    ("log", "engine"),
    [
        ("INFO Initializing a V1 LLM engine (v0.22.1) with config", "vllm"),
        ('  File "/opt/venv/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 8, in run', "vllm"),
        ("[2026-01-01 00:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 64", "sglang"),
        ('  File "/srv/sglang/python/sglang/srt/managers/scheduler.py", line 2, in run', "sglang"),
        ("[12/05/2025-09:00:11] [TRT-LLM] [RANK 0] [E] Failed to initialize executor", "tensorrt-llm"),
        ("llama_model_load: error loading model: missing tensor", "llama.cpp"),
        ("mlx_lm.generate --model GLM-5.2", "mlx-lm"),
        (
            '  File "lib/python3.12/site-packages/transformers/models/auto/auto_factory.py", line 3, in x',
            "transformers",
        ),
        # vLLM and SGLang load configs through Transformers: their own files say more.
        ("transformers/models/auto/configuration_auto.py\nvllm/v1/worker/gpu_worker.py", "vllm"),
        ("RuntimeError: something", None),
    ],
)
def test_the_engine_that_wrote_it(log, engine):
    assert told(log).get("engine") == engine


@pytest.mark.parametrize(
    ("log", "sparse"),
    [
        ("INFO Resolved architecture: GlmMoeDsaForCausalLM\nINFO Using max model len 1000", True),
        ("INFO Resolved architecture: DeepseekV32ForCausalLM", True),
        ("INFO Resolved architecture: Qwen2ForCausalLM\nInitializing a V1 LLM engine", False),
        ("INFO Resolved architecture: TransformersForCausalLM", None),
        ("[TP0] Load weight end. elapsed=35.21 s, type=Qwen3MoeForCausalLM, dtype=torch.bfloat16", False),
        ('File "/x/vllm/model_executor/models/qwen3_moe.py", line 3, in forward', False),
        ('File "/x/vllm/model_executor/models/deepseek_v2.py", line 3, in forward', None),
        ("vllm serve Qwen/Qwen3-8B --max-model-len 1000", False),
        ("vllm serve deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8", True),
        ("vllm serve deepseek-ai/DeepSeek-V3.1", False),
        ("docker run image --model nvidia/Qwen3-30B --port 8000", False),
        ("Args(models=DeepSeek-R1, dtype=bf16)", False),
        ("python -m sglang.launch_server --model-path /data/llama-factory/out --tp 8", None),
        ("non-default args: {'model': 'zai-org/GLM-5.1-FP8'}\nmodels/llama_eagle3.py of a draft", True),
        ('File "/home/me/train.py", line 3, in step\nRuntimeError: selected index k out of range', False),
        ('File "/home/me/serve.py", line 3, in x\nFile "/v/vllm/entrypoints/llm.py", line 2, in y', None),
        ('File "/v/lib/python3.12/site-packages/torch/_ops.py", line 2, in y', None),
        ("RuntimeError: something", None),
    ],
)
def test_whether_its_model_is_sparse(log, sparse):
    assert told(log).get("dsa") is sparse


@pytest.mark.parametrize(
    ("log", "facts"),
    [
        ("vllm serve M --tensor-parallel-size 8 --kv-cache-dtype fp8_ds_mla --max-model-len=131072", {"tp": 8, "kv_cache_dtype": "fp8_ds_mla", "max_model_len": 131072}),
        ("vllm serve M --max-model-len 128k\n", {"max_model_len": 128000}),
        ("vllm serve M --max-model-len 128K --max-num-batched-tokens 8192", {"max_model_len": 131072, "max_num_batched_tokens": 8192}),
        ("INFO max_model_len=65536\nconfigured", {"max_model_len": 65536}),
        ("server_args=ServerArgs(model_path='x', context_length=65536, tp_size=8, pp_size=2, kv_cache_dtype='bfloat16', chunked_prefill_size=4096", {"tp": 8, "pp": 2, "kv_cache_dtype": "bfloat16", "max_model_len": 65536, "max_num_batched_tokens": 4096}),
        ("Setting KV cache dtype to fp8_e4m3 for DeepSeek DSA on SM12 device.", {"kv_cache_dtype": "fp8_e4m3", "arch": "sm120", "sm": 120, "vendor": "nvidia"}),
        ("--decode-context-parallel-size 4 --block-size 64 --pipeline-parallel-size 2", {"dcp": 4, "block_size": 64, "pp": 2}),
        ("Using default MoE config. Performance might be sub-optimal! E=8,device_name=NVIDIA_H200,dtype=fp8", {"arch": "sm90"}),
        ("GPU 0: NVIDIA GB10\nGPU 1: NVIDIA GB10", {"arch": "sm121"}),
        ("GPU 0: AMD Instinct MI355X", {"arch": "gfx950", "vendor": "amd"}),
        ("device_name=NVIDIA_A100-SXM4-80GB", {"arch": "sm80"}),
        ("device_name=NVIDIA_L40S", {"arch": "sm89"}),
        ("GCN arch: gfx942", {"arch": "gfx942", "vendor": "amd"}),
    ],
)  # fmt: skip
def test_settings_as_they_are_printed_and_pasted(log, facts):
    found = told(log)
    assert {name: found.get(name) for name in facts} == facts


SINKS = (
    "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration.\nReason: [{}]"
)
TOPK = "RuntimeError: selected index k out of range"
MARKS = "!" * 64


@pytest.mark.parametrize(
    ("log", "facts", "named"),
    [
        (MARKS, {}, ["nan-logits-exclamation-marks"]),
        (f"Resolved architecture: Qwen2ForCausalLM\n{MARKS}", {}, []),
        (MARKS, {"dsa": False}, []),
        (SINKS.format("'attention sinks not supported'"), {}, []),
        (SINKS.format("'attention sinks not supported'"), {"dsa": True, "dsa_assumed": True}, []),
        (SINKS.format("'attention sinks not supported'"), {"dsa": True}, ["forced-backend-not-sparse"]),
        (SINKS.format("'sparse not supported'"), {}, ["forced-backend-not-sparse"]),
    ],
)
def test_a_message_of_any_model_counts_for_a_sparse_one_alone(log, facts, named):
    common = {"nan-logits-exclamation-marks", "forced-backend-not-sparse"}
    assert [name for name in leads_to(log, facts) if name in common] == named


def test_a_message_of_any_program_counts_beside_an_engine_alone(asks, tmp_path):
    verdict, first = {}, {}
    for name, log in (
        ("alone", TOPK),
        ("engine", f"[2026-01-01 00:00:00 TP0] Decode batch\n{TOPK}\n[2026-01-01 00:00:00 TP1] Decode batch"),
    ):
        _, result = asks("--log", write(tmp_path / name, log), "--static")
        verdict[name], first[name] = (
            result["verdict"],
            next(one for one in result["findings"] if one["id"] != "unknown"),
        )
    assert verdict == {"alone": "unknown", "engine": "fault"}
    assert first["alone"]["standing"] == "possible"
    assert first["engine"]["id"] == first["alone"]["id"] == "topk-larger-than-length"


def test_a_config_says_better_than_a_log_what_the_model_is(asks, tmp_path):
    log = write(tmp_path / "log", f"Resolved architecture: Qwen2ForCausalLM\n{MARKS}")
    _, result = asks("--log", log, "--static", "--model", model(tmp_path))
    assert result["findings"][0]["id"] == "nan-logits-exclamation-marks"


def test_another_engine_s_log_is_not_judged_by_the_vllm_here(asks, tmp_path):
    log = write(
        tmp_path / "log",
        "[2026-01-01 00:00:00 TP0] Prefill batch, #new-seq: 1\n[2026-01-01 00:00:00 TP0] RuntimeError: new",
    )
    _, result = asks("--log", log, "--static")
    assert result["verdict"] == "unknown"
    assert result["source"] is None
    assert result["engine_candidates"] is None
    assert any("the log is from sglang" in note for note in result["notes"])


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        '    raise RuntimeError("cut here"',
        "    assert not (self.use_nsa",
        "[TP0] Scheduler hit an exception: cut here",
        "llama_model_load: error loading model: x",
        "ds4: required tensor is missing: token_embd.weight",
        "Missing 285 parameters:",
        "thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        "[12/05/2025-09:00:11] [TRT-LLM] [RANK 0] [E] First stride of self",
        "E0714 10:00:00.123456 12 process.cc:3] died",
        "api_server: error: unrecognized arguments: --x",
        "INFO 07-15 15:33:47 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds.",
        "ERROR 07-15 15:33:47 [core.py:1] it failed",
        "[ERROR] RUNTIME(4120,python3):2026-01-05 the device is lost",
        "Value error, no such thing",
        "[W101 10:00:00] memory allocation failed with OOM on device 5",
        "2026-01-05 10:00:00 | ERROR | stderr | it failed",
    ],
)
def test_a_failure_is_seen_without_an_error_s_name(line):
    assert scan(io.BytesIO(f"a line\n{line}\n".encode()), {}).first_error.startswith("log line 2: ")


@pytest.mark.parametrize(
    "line",
    [
        "INFO 07-15 15:33:47 [core.py:1] no error: all is well",
        'WARNING 07-15 15:33:47 [core.py:1]     raise ValueError("retried")',
        "DEBUG 07-15 15:33:47 [core.py:1] Traceback (most recent call last):",
        "errors: 0",
        "loaded, 0 failed",
    ],
)
def test_what_is_no_failure(line):
    assert scan(io.BytesIO(f"{line}\n".encode()), {}).first_error == ""
