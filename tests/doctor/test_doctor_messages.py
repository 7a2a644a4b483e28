"""Every message of the installed engine's sparse-MLA code, and every known message in a damaged log: right entry or unknown."""

from __future__ import annotations

import ast
import io
import random

import pytest
from doctor_evidence import SIGNATURES, leads_to

from sparse_mla.doctor.knowledge import load
from sparse_mla.doctor.logs import scan
from sparse_mla.engine_source import tree as source

FILES = (
    "model_executor/layers/sparse_attn_indexer.py", "model_executor/layers/sparse_mqa_indexer.py",
    "model_executor/layers/indexer_topk.py", "model_executor/layers/attention/sparse_mla_attention.py",
    "model_executor/layers/attention/mla_attention.py", "model_executor/layers/mla.py",
    "model_executor/kernels/attention/dsa/sparse_mqa_logits.py", "model_executor/warmup/flashinfer_sparse_mla_warmup.py",
    "v1/attention/ops/rocm_aiter_mla_sparse.py", "v1/attention/ops/xpu_mla_sparse.py", "v1/attention/ops/flashmla.py",
    "v1/worker/workspace.py", "utils/deep_gemm.py", "platforms/cuda.py", "platforms/rocm.py", "platforms/cpu.py", "platforms/xpu.py",
)  # fmt: skip
FOLDERS = ("v1/attention/backends/mla", "models/deepseek_v32")

# Beginning of a message (or a part of it) -> the entry a reader must be sent to. What is not here must be unknown.
RIGHT = {
    "DCP sparse-indexer merge requires CuteDSL": "dcp-merge-needs-cutedsl",
    "DCP sparse-indexer merge requires CUDA": "dcp-merge-shape-limits",
    "DCP sparse-indexer merge requires fp32": "dcp-merge-shape-limits",
    "DCP sparse-indexer merge requires index_topk": "dcp-merge-shape-limits",
    "DCP with sparse indexer KV compression": "dcp-merge-shape-limits",
    "Sparse attention indexer ROCm path requires": "rocm-indexer-needs-aiter",
    "Sparse Attention Indexer CUDA op requires": "deepgemm-missing",
    "DeepGEMM backend is unavailable": "deepgemm-missing",
    "XPU fp8_paged_mqa_logits does not": "xpu-no-fp8-cache",
    "XPU fp8_mqa_logits does not": "xpu-no-fp8-cache",
    "FP8 kv is not supported with XPU": "xpu-no-fp8-cache",
    "The ROCm sparse-indexer path does not support PCP+DCP": "dcp-flashmla-refused",
    "Masked MHA with context does not yet": "dcp-flashmla-refused",
    "DCP for FlashMLA sparse": "dcp-flashmla-refused",
    "PCP+DCP sparse prefill gathers": "dcp-flashmla-refused",
    "sparse_indexer_topk_backend=": "topk-backend-not-usable",
    "Sparse MLA top-k mask": "sparse-mask-workspace-small",
    "Workspace is locked but": "workspace-locked-too-small",
    "is not valid for this configuration. Reason": "forced-backend-not-sparse",
    "No valid attention backend found for": "no-sparse-backend",
    "Sparse Attention is not supported on CPU": "sparse-refused-on-cpu",
    "Indexer or topk_indices_buffer required": "shared-indexer-layers-unknown",
    "FlashAttnMLASparseImpl currently supports only": "fa-sparse-needs-16-bit-cache",
    "FLASHINFER_MLA_SPARSE_SM120 requires the packed": "sm120-needs-packed-cache",
    "FLASHINFER_MLA_SPARSE_SM120 requires FlashInfer": "flashinfer-without-sparse-api",
    "FlashInferMLASparseSM90 plan() called": "flashinfer-plan-inside-capture",
    "FlashMLA Sparse Attention backend only supports the": "kv-cache-dtype-not-supported",
    "indexer K cache block size": "block-size-not-supported",
    "Padding num_heads from": "flashmla-pads-few-heads",
    "indexer_kv_dtype=": "indexer-cache-dtype-refused",
    "block stride is not a whole number of rows": "block-stride-not-whole-rows",
    "MTP speculative decoding layer": "speculative-layer-weights-missing",
}


def text_of(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.replace("%s", "x7").replace("%d", "7")
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "7" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return ""


def messages():
    """(file, line, text) of every raise, assertion message and log call."""
    opened = source.installed()
    paths = [
        *FILES,
        *(
            str(file.relative_to(opened.root))
            for folder in FOLDERS
            for file in sorted((opened.root / folder).rglob("*.py"))
        ),
    ]
    for path in paths:
        for node in ast.walk(opened.tree(path)):
            text = ""
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                text = text_of(node.exc.args[0])
            elif isinstance(node, ast.Assert) and node.msg is not None:
                text = text_of(node.msg)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                logs = node.func.attr.startswith(("warning", "error", "info", "exception", "critical"))
                text = text_of(node.args[0]) if logs else ""
            if len(text) > 8:
                yield path, node.lineno, text


def hits(text):
    return {hit.key for hit in scan(io.BytesIO(text.encode()), SIGNATURES).hits}


def test_messages_of_the_installed_engine(record_property):
    found = right = labelled = recalled = total = 0
    wrong = []
    for path, line, text in messages():
        total += 1
        wanted = {identifier for begin, identifier in RIGHT.items() if begin in text}
        got = hits(text)
        found += len(got)
        right += len(got & wanted)
        labelled += bool(wanted)
        recalled += bool(got & wanted)
        if got != wanted:
            wrong.append((path, line, text[:90], sorted(got), sorted(wanted)))
    precision, recall = right / found, recalled / labelled
    print(f"\n{total} messages, {labelled} with an entry: precision {precision:.3f}, recall {recall:.3f}")
    record_property("precision", precision)
    record_property("recall", recall)
    assert not wrong, "\n".join(map(str, wrong))
    assert total > 300
    assert labelled >= 40


KNOWN = [defect for defect in load() if defect.signatures and defect.positive.log]
OTHER = "INFO 05-12 10:11:12 [loggers.py:12] Engine 000: Avg prompt throughput: 12.1 tokens/s"


def wrapped(text, width, _rng):
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def interleaved(text, width, rng):
    """The message in pieces with a worker's prefix, other workers' lines between them."""
    made = []
    for start in range(0, len(text), width):
        made.append(f"(Worker_TP0 pid=100) ERROR 05-12 10:11:12 [multiproc.py:7] {text[start : start + width]}")
        made += [
            f"(Worker_TP{rng.randint(1, 7)} pid={rng.randint(101, 107)}) {OTHER}" for _ in range(rng.randint(0, 3))
        ]
    return "\n".join(made)


def coloured(text, _width, _rng):
    return f"\x1b[1;31m(EngineCore pid=9)\x1b[0m \x1b[31mERROR\x1b[0m {text}\x1b[0m"


def behind_a_collector(text, _width, _rng):
    return "\n".join(
        f"2026-05-01T10:00:00.1234Z stdout F vllm-1  | {line}" for line in [OTHER, *text.split("\n"), OTHER]
    )


def in_utf16_noise(text, _width, rng):
    return "".join(chr(rng.randint(0x4E00, 0x9FFF)) for _ in range(50)) + "\n" + text


DAMAGE = {
    "wrapped": wrapped,
    "interleaved": interleaved,
    "coloured": coloured,
    "collector": behind_a_collector,
    "noise": in_utf16_noise,
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("width", [17, 80])
def test_damaged_logs(kind, width, record_property):
    rng = random.Random(width)
    recalled, wrong = 0, []
    for defect in KNOWN:
        plain = defect.positive.log
        got = set(leads_to(DAMAGE[kind](plain, width, rng), defect.positive.facts))
        recalled += defect.id in got
        wrong += [(defect.id, extra) for extra in got - set(leads_to(plain, defect.positive.facts))]
    print(f"\n{kind} at {width}: {len(KNOWN)} logs, recall {recalled / len(KNOWN):.3f}, {len(wrong)} wrong")
    record_property("recall", recalled / len(KNOWN))
    assert recalled == len(KNOWN)
    assert wrong == []


@pytest.mark.parametrize(("columns", "least"), [(160, 0.9), (100, 0.85), (72, 0.7)])
def test_truncated_logs(columns, least):
    """A cut message leads to its entry or to nothing, never to another's, except that a cut selector error cannot tell a
    setting from the device."""
    recalled, wrong = 0, []
    for defect in KNOWN:
        cut = "\n".join(line[:columns] for line in defect.positive.log.splitlines())
        got = set(leads_to(cut, defect.positive.facts))
        recalled += defect.id in got
        allowed = set(leads_to(defect.positive.log, defect.positive.facts))
        wrong += [(defect.id, extra) for extra in got - allowed - {"no-sparse-backend"}]
    print(f"\ncut to {columns} columns: {len(KNOWN)} logs, recall {recalled / len(KNOWN):.3f}, {len(wrong)} wrong")
    assert wrong == []
    assert recalled >= least * len(KNOWN)


def test_lines_that_only_look_alike():
    for text in (
        "INFO sparse attention enabled", "WARNING No valid API key found for cuda", "ValueError: backend selected", "requires X MB",
        "Workspace is open", "RuntimeError: CUDA error: out of memory in user code", "DCP enabled", OTHER, "TRITON_MLA: [sparse not supported]",
    ):  # fmt: skip
        assert hits(text) == set(), text
