"""Breaks the installed vLLM on purpose, once per case, and keeps what it logged: ``python break_engine.py FOLDER [CASE...]``.

The logs in ``logs/`` were made with it and are read by test_doctor_broken_engine.py. Paths of this machine are shortened, nothing
else is touched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from sparse_mla.testing.tiny_model import tiny_config, write_tiny_model

BASE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
}
OFF = {"SPARSE_MLA_VLLM": "off"}
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    llm.generate([{"prompt_token_ids": list(range(2, 40))}], SamplingParams(max_tokens=2, detokenize=False))
"""


def without(*words: str):
    """Drop the weights whose name holds one of ``words``."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        for file in folder.glob("*.safetensors"):
            tensors = {
                name: value for name, value in load_file(file).items() if not any(word in name for word in words)
            }
            save_file(tensors, file)
        for index in folder.glob("*.index.json"):
            index.unlink()

    return change


def config(**changes):
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def text(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


# name: (change to the checkpoint, engine arguments, environment)
CASES = {
    "stock": (None, {}, OFF),
    "stock-by-name": (None, {"attention_config": {"backend": "FLASHMLA_SPARSE"}}, OFF),
    "stock-fp8-cache": (None, {"kv_cache_dtype": "fp8"}, OFF),
    "stock-chunked": (None, {"max_num_batched_tokens": 512}, OFF),
    "stock-batch-invariant": (None, {}, {**OFF, "VLLM_BATCH_INVARIANT": "1"}),
    "stock-two-ranks": (None, {"tensor_parallel_size": 2}, {**OFF, "VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    "ours-fp8-cache": (None, {"kv_cache_dtype": "fp8"}, {}),
    "ours-bad-variable": (None, {}, {"SPARSE_MLA_VLLM": "sometimes"}),
    "ours-layer-zero-shared": (config(indexer_types=["shared", "full", "full"]), {}, {}),
    "indexer-weights-missing": (without("indexer.k_norm"), {}, {}),
    "attention-weights-missing": (without("kv_b_proj"), {}, {}),
    "config-cut": (text("config.json", '{"architectures": ["Glm'), {}, {}),
    "config-unknown-architecture": (config(architectures=["NoSuchModel"]), {}, {}),
    "weights-rubbish": (text("model.safetensors", "rubbish"), {}, {}),
    "unknown-backend-name": (None, {"attention_config": {"backend": "NO_SUCH_BACKEND"}}, {}),
    "context-too-long": (None, {"max_model_len": 1 << 24}, {}),
    "heads-do-not-divide": (None, {"tensor_parallel_size": 3}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0"}),
    "cache-too-small": (None, {"kv_cache_memory_bytes": 1 << 12}, {}),
    "no-such-option": (None, {"no_such_option": 1}, {}),
    "no-such-cache-dtype": (None, {"kv_cache_dtype": "fp7"}, {}),
    "topk-zero": (config(index_topk=0), {}, {}),
    "dense-healthy": (config(), {}, {}),
}


def main(target: Path, names: list[str]) -> None:
    for name in names or list(CASES):
        change, arguments, environment = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            write_tiny_model(folder, **tiny_config())
            if change is not None:
                change(folder)
            target.joinpath(f"{name}.log").write_text(logged(Path(scratch), folder, arguments, environment))
        print(name, flush=True)


def logged(scratch: Path, folder: Path, arguments: dict, environment: dict) -> str:
    script = scratch / "serve.py"
    script.write_text(SERVE)
    done = subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps({**BASE, **arguments})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=400,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
    )
    shortened = done.stdout.replace(str(scratch), "SCRATCH")
    shortened = re.sub(r"[^\s\"'(=]*/site-packages/", "site-packages/", shortened)
    shortened = re.sub(r"[^\s\"'(=]*/(lib/python3\.\d+/)", r"\1", shortened)
    return re.sub(r"[^\s\"'(=]*/src/sparse_mla/", "sparse_mla/", shortened)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
