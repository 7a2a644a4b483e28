from __future__ import annotations

import io
import json

from sparse_mla.doctor.facts import Facts
from sparse_mla.doctor.findings import Evidence, judge
from sparse_mla.doctor.knowledge import load
from sparse_mla.doctor.log_facts import LOG_FACTS, from_log
from sparse_mla.doctor.logs import scan
from sparse_mla.engine_source.audit import Probe

CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
SIGNATURES = {defect.id: defect.signatures for defect in load() if defect.signatures}


def evidence(log="", facts=None, probes=None, **more):
    """Evidence as diagnose() gathers it, from text and plain values."""
    known, hits = Facts(), None
    if log:
        report = scan(io.BytesIO(log.encode()), SIGNATURES, LOG_FACTS)
        hits = {hit.key: hit for hit in report.hits}
        known.add("log", from_log(report))
    known.add("given", facts or {})
    answers = {
        name: Probe(id=name, status=status, where="file.py:1", what="read") for name, status in (probes or {}).items()
    }
    return Evidence(
        facts=known.values,
        of_log=known.of_log,
        hits=hits,
        probes=answers or None,
        flags=more.pop("flags", None),
        **more,
    )


def leads_to(log="", facts=None, probes=None, **more):
    """Ids that the evidence leads to, in reading order."""
    return [finding.defect.id for finding in judge(load(), evidence(log, facts, probes, **more))]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def model(tmp_path, **changes):
    return write(tmp_path / "config.json", json.dumps({**CONFIG, **changes}))
