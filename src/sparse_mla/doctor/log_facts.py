"""What a log tells beside its errors: the engine that wrote it, its model, device and settings.

Logs are searched without whitespace, so nothing but a value's own form ends it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .facts import LOGITS_VARIABLE, device_facts
from .signatures import Signature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .expressions import Fact
    from .logs import LogReport


def _settings(name: str) -> tuple[Signature, ...]:
    """The two ways in which engines print a setting: ``name=value`` and ``'name': value``."""
    return (Signature(f"{name}={{value:word}}"), Signature(f"'{name}': {{value:word}}"))


def _anywhere(*texts: str) -> tuple[Signature, ...]:
    return tuple(map(Signature, texts))


def _option(*names: str) -> tuple[Signature, ...]:
    """A launch option as people paste it: ``--name value`` or ``--name=value``."""
    return tuple(Signature(f"--{name}{sign}{{value:word}}") for name in names for sign in ("=", ""))


# Families whose models attend to everything: their files in a traceback, their names in a launch. No family of a DSA model.
_DENSE = (
    *("qwen", "llama", "mistral", "mixtral", "gemma", "phi", "gpt_oss", "granite", "falcon", "internlm"),
    *("minicpm", "baichuan", "olmo", "cohere", "chatglm", "glm4", "bert", "opt", "starcoder", "exaone", "nemotron"),
)
_MODEL_FILES = ("vllm/model_executor/models/", "sglang/srt/models/", "transformers/models/")

LOG_FACTS: Mapping[str, tuple[Signature, ...]] = {
    "version:vllm": (
        Signature("Initializing a V1 LLM engine (v{value:version}"),
        Signature("vLLM API server version {value:version}"),
        Signature("vLLM engine version {value:version}"),
    ),
    "version:sglang": (Signature("sglang version: {value:version}"), Signature("sglang_version={value:version}")),
    # Which engine wrote the log, where it prints no version; the first of these that occurs.
    "by:tensorrt-llm": _anywhere("[TRT-LLM]", "tensorrt_llm/"),
    "by:sglang": _anywhere(
        *("sglang/srt/", "server_args=ServerArgs(", "sglang.launch_server", "sgl-workspace", "Prefill batch, #new-seq"),
        *("Set DSA backends", "Set NSA backends", "for DeepSeek with DSA", "for DeepSeek DSA"),
    ),
    "by:vllm": _anywhere(
        *("packages/vllm/", "vllm/v1/", "vllm/model_executor/", "vllm serve ", "vllm.entrypoints", "EngineCore"),
        *("Resolved architecture: ", "No available memory for the cache blocks", "AttentionBackendEnum"),
    ),
    "by:llama.cpp": _anywhere("llama_model_load", "llama.cpp", "GGML_ASSERT", "ggml_backend", "missing tensor 'blk."),
    "by:mlx-lm": _anywhere("mlx_lm", "mlx-lm"),
    "by:transformers": _anywhere("transformers/models/", "transformers/modeling_utils"),
    # What was served. A sign of a sparse model beats one of a dense model: a draft model may be dense.
    "sparse model": _anywhere(
        *("DeepseekV32", "deepseek_v32", "DeepSeek-V3.2", "deepseek-v3.2"),
        *("GlmMoeDsa", "glm_moe_dsa", "GLM-5.", "glm-5."),
        *("DeepseekV4", "DeepSeek-V4", "deepseek_v4", "Glm5Next", "glm5_next", "DeepSeek DSA", "DeepSeek with DSA"),
        *("use_sparse=True", "index_topk", "MLA_SPARSE", "MLASparse", "sparse-MLA", "sparse MLA"),
        *("sparse_attn_indexer", "mqa_logits", "self_attn.indexer", "indexer.py", "flashmla_sparse", "nsa_backend"),
        *("dsa_indexer", "fp8_ds_mla", "DSA sparse attention", "sparse not supported", "Sparse Attention"),
    ),
    "dense model": tuple(Signature(f"{place}{name}") for place in _MODEL_FILES for name in _DENSE),
    # What only a server prints that has started.
    "serving": _anywhere(
        'HTTP/1.1" 200 OK', "Application startup complete", "The server is fired up", "Graph capturing finished"
    ),
    "architecture": (
        Signature("Resolved architecture: {value:word}"),
        Signature("Load weight end.{how}type={value:word}"),
        Signature('"architectures": ["{value:word}'),
    ),
    "model name": _anywhere(
        *("model_path='{value}'", "with config: model='{value}'", "args: {'model': '{value}'", "--model-path {value}"),
        *("vllm serve --model {value}", "vllm serve {value}", "api_server --model {value}"),
        *("--model {value}", "models={value:word}"),
    ),
    "tp": (
        *_settings("tensor_parallel_size"),
        *_option("tensor-parallel-size", "tp-size"),
        Signature("tp_size={value:word}"),
    ),
    "pp": (*_settings("pipeline_parallel_size"), *_option("pipeline-parallel-size"), Signature("pp_size={value:word}")),
    "dcp": (*_settings("decode_context_parallel_size"), *_option("decode-context-parallel-size")),
    "max_model_len": (
        *_settings("max_model_len"),
        *_option("max-model-len", "context-length"),
        Signature("max_seq_len={value:word}"),
        Signature("context_length={value:word}"),
    ),
    "max_num_batched_tokens": (
        *_settings("max_num_batched_tokens"),
        *_option("max-num-batched-tokens", "chunked-prefill-size"),
        Signature("chunked_prefill_size={value:word}"),
    ),
    "kv_cache_dtype": (
        Signature("kv_cache_dtype={value:word}"),
        Signature("kv_cache_dtype='{value:word}"),
        Signature("'kv_cache_dtype': '{value:word}"),
        Signature("Setting KV cache dtype to {value:word}"),
        *_option("kv-cache-dtype"),
    ),
    "block_size": (
        Signature("'block_size': {value:word}"),
        Signature("cache_config.block_size={value:word}"),
        *_option("block-size"),
    ),
    "speculative_tokens": (
        Signature("num_speculative_tokens={value:word}"),
        Signature("num_speculative_tokens': {value:word}"),
        Signature('num_speculative_tokens": {value:word}'),
    ),
    "candidates": (Signature("attention backend out of potential backends: [{value}]"),),
    "max:prompt_tokens": (Signature('"prompt_tokens": {value:num}'),),
    "arch": (Signature("GCN arch: {value:word}"), Signature("gcnArchName='{value:word}")),
    "gpu": _anywhere(
        "device_name={value:word}", "GPU 0: NVIDIA {value}", "GPU 0: AMD {value}", "DSA on SM{value:num} device"
    ),
    "logits_mb": (Signature(f"{LOGITS_VARIABLE}={{value:num}}"),),
    "batch_invariant": (Signature("VLLM_BATCH_INVARIANT={value:num}"),),
    "hisparse": (Signature("hisparse_config=HiSparseConfig({value}"),),
    "calculate_kv_scales": (Signature("'calculate_kv_scales': {value:word}"),),
}
_NUMBERS = {
    *("tp", "pp", "dcp", "max_model_len", "max_num_batched_tokens", "block_size", "speculative_tokens", "logits_mb"),
    "prompt_tokens",
}
_FLAGS = {"batch_invariant": {"1"}, "calculate_kv_scales": {"True"}}
_DTYPES = re.compile(r"fp8_e4m3fnuz|fp8_e4m3|fp8_e5m2|fp8_ds_mla|fp8_inc|fp8|bfloat16|float16|auto")
_SIZE = re.compile(r"(\d{1,15})(?:([kKmM])(?![a-zA-Z]))?")
_UNITS = {None: 1, "k": 1000, "K": 1 << 10, "m": 1000**2, "M": 1 << 20}  # as vLLM reads them
_ARCHITECTURE = re.compile(r"(?!Transformers)\w{1,60}?(?:ForCausalLM|ForConditionalGeneration|LMHeadModel)")
_SPARSE_ARCHITECTURE = re.compile(r"V32|V4|Dsa|Glm5")
_DENSE_NAME = re.compile(
    r"(?:^|[_-])(?:qwen|llama|mistral|mixtral|gemma|phi-|gpt-oss|granite|falcon|internlm|glm-?4|kimi|olmo|exaone|nemotron"
    r"|deepseek-(?:r1|v2|v3(?!\.2)))",
    re.IGNORECASE,
)
# Names of parts: NVIDIA's table of compute capabilities, AMD's of ROCm targets; a bare number is SGLang's major version.
_GPUS = tuple(
    (re.compile(names), arch)
    for names, arch in (
        ("GB10", "sm121"),
        ("B300", "sm103"),
        ("B200|^10$", "sm100"),
        ("RTX_?50[5-9]0|RTX_?PRO_?6000|^12$", "sm120"),
        ("H100|H200|H20|H800|^9$", "sm90"),
        ("L40|L4|RTX_?40[5-9]0|6000_?Ada", "sm89"),
        ("A100|A800|A30", "sm80"),
        ("A10|A40|A6000|RTX_?30[5-9]0", "sm86"),
        ("MI35[05]", "gfx950"),
        ("MI30[08]|MI325", "gfx942"),
    )
)
_NAME_CHARS = 80  # of a name that nothing but its length may end


def from_log(report: LogReport) -> dict[str, Fact]:
    """Settings that the engine printed, as facts; and what it was, and whether its model is a sparse one."""
    texts = {name.removeprefix("max:"): text for name, text in report.facts.items()}
    found: dict[str, Fact] = {"dsa": _serves_sparse(texts, report), "engine": _writer(texts), "arch": _arch(texts)}
    found["engine_named"] = found["engine"] is not None or report.num_workers > 1 or None
    found["serving"] = ("serving" in texts and not report.first_error) or None
    for name in ("sparse model", "dense model", "architecture", "model name", "gpu", "arch", "serving"):
        texts.pop(name, None)
    for name, text in texts.items():
        if name.startswith("by:"):
            continue
        if name in _NUMBERS:
            found[name] = _whole(text)
        elif name in _FLAGS:
            found[name] = text in _FLAGS[name]
        elif name == "kv_cache_dtype":
            dtype = _DTYPES.match(text)
            found[name] = dtype.group() if dtype else text.rstrip(".,)")
        else:
            found[name] = True if name == "hisparse" else text.rstrip(".,)")
    if "ROCM_" in texts.get("candidates", ""):
        found["vendor"] = "amd"
    if found["arch"] is not None:
        found = {**device_facts(str(found["arch"])), **found}
    return {name: value for name, value in found.items() if value is not None}


def _whole(text: str) -> int | None:
    """A size: ``131072``, ``128k``. Options of the next line may follow without a space."""
    size = _SIZE.match(text.partition("--")[0])
    return int(size[1]) * _UNITS[size[2]] if size else None


def _writer(texts: Mapping[str, str]) -> str | None:
    """The engine that wrote the log, by the version it prints or by its files and habits."""
    signs = ("version:vllm", "version:sglang", *(name for name in LOG_FACTS if name.startswith("by:")))
    return next((name.partition(":")[2] for name in signs if name in texts), None)


def _arch(texts: Mapping[str, str]) -> str | None:
    if "arch" in texts:
        return texts["arch"].rstrip(".,)")
    gpu = texts.get("gpu", "")[:_NAME_CHARS]
    return next((arch for names, arch in _GPUS if names.search(gpu)), None)


def _serves_sparse(texts: Mapping[str, str], report: LogReport) -> bool | None:
    """Whether the log's model is a DSA model; None where nothing says so."""
    architecture = _ARCHITECTURE.match(texts.get("architecture", ""))
    if "sparse model" in texts or (architecture and _SPARSE_ARCHITECTURE.search(architecture.group())):
        return True
    name = texts.get("model name", "").partition("--")[0][:_NAME_CHARS].rstrip("/").rpartition("/")[2]
    dense = architecture or "dense model" in texts or _DENSE_NAME.search(name) or report.foreign
    return False if dense else None
