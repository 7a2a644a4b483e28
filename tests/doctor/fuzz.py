"""Makes hostile logs and configs from a seed and reads them: no traceback, bounded memory and time.

python tests/doctor/fuzz.py [COUNT [SEED]]        a long run; prints what it did
"""

from __future__ import annotations

import io
import json
import random
import sys
import time
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparse_mla.doctor.facts import from_config
from sparse_mla.doctor.findings import Evidence, judge
from sparse_mla.doctor.knowledge import load
from sparse_mla.doctor.log_facts import LOG_FACTS, from_log
from sparse_mla.doctor.logs import scan
from sparse_mla.errors import ConfigError

SIGNATURES = {defect.id: defect.signatures for defect in load() if defect.signatures}
SEEDS = [defect.positive.log for defect in load() if defect.positive.log]
NOISE = (
    "\x1b[31m",
    "\x1b]0;",
    "\0",
    "\r",
    "\u202e",
    "\ufeff",
    "[[",
    "]]",
    "{",
    "}",
    "'",
    "[" * 50,
    "9" * 30,
    "-1",
    "\t",
    "!" * 30,
    " | ",
)
PREFIXES = (
    "(Worker_TP3 pid=7) ",
    "ERROR 01-02 03:04:05 [a.py:1] ",
    "[rank1]: ",
    "[2026-01-02 03:04:05 TP1] ",
    "vllm-1  | ",
    "",
)
ENCODINGS = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1")
CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": 8, "num_attention_heads": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    "index_topk_freq": 4, "indexer_types": ["full"] * 8, "quantization_config": {"quant_method": "fp8"}, "dtype": "bfloat16",
}  # fmt: skip
VALUES = (
    None,
    True,
    0,
    -1,
    7,
    10**40,
    1.5,
    float("nan"),
    "",
    "x" * 9000,
    "\x1b[31m",
    [],
    [[]],
    {},
    {"a": {}},
    ["shared"] * 8,
    "2048",
)


def hostile_log(rng: random.Random) -> bytes:
    """Pieces of messages that the knowledge base knows, damaged, among junk."""
    pieces: list[str] = []
    for _ in range(rng.randint(1, 12)):
        text = rng.choice(SEEDS)
        start = rng.randrange(len(text) + 1)
        text = rng.choice((text, text[start:], text[:start], text[start:] + text[:start]))
        for _ in range(rng.randint(0, 3)):
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(NOISE) * rng.choice((1, 1, 1, 40)) + text[place:]
        pieces.append(
            rng.choice(PREFIXES) + text * rng.choice((1, 1, 1, 30)) + rng.choice(("\n", "\r\n", "\r", "", " "))
        )
    raw = "".join(pieces).encode(rng.choice(ENCODINGS), errors="replace")
    if rng.random() < 0.3:
        raw = (
            raw[: rng.randrange(len(raw) + 1)] + rng.randbytes(rng.randint(0, 400)) + raw[rng.randrange(len(raw) + 1) :]
        )
    return raw * rng.choice((*(1,) * 12, 100))


def hostile_config(rng: random.Random) -> bytes:
    """A config with absurd values, cut or spoilt."""
    fields = dict(CONFIG)
    for _ in range(rng.randint(0, 4)):
        name = rng.choice((*CONFIG, "\x1b[31m", "architectures"))
        if rng.random() < 0.2:
            fields.pop(name, None)
        else:
            fields[name] = rng.choice(VALUES)
    raw = json.dumps(fields).encode()
    damage = rng.random()
    if damage < 0.1:
        return raw[: rng.randrange(len(raw))]
    if damage < 0.2:
        return raw[:40] + rng.randbytes(30) + raw[40:]
    return b"[" * 60_000 if damage < 0.21 else raw


@dataclass
class Outcome:
    """Of one run: inputs, how many were refused in one line, findings, and the largest costs."""

    logs: int = 0
    configs: int = 0
    refused: int = 0
    found: int = 0
    log_bytes: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0


def run(count: int, seed: int) -> Outcome:
    """Read ``count`` logs and as many configs; whatever escapes is the caller's to see, with the seed of the input."""
    outcome = Outcome()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            try:
                _log(hostile_log(rng), outcome)
                _config(path, hostile_config(rng), rng, outcome)
            except Exception as error:
                raise AssertionError(f"input {number} of seed {seed}") from error
    return outcome


def _log(raw: bytes, outcome: Outcome) -> None:
    tracemalloc.start()
    began = time.process_time()
    report = scan(io.BytesIO(raw), SIGNATURES, LOG_FACTS)
    facts = from_log(report)
    hits = {hit.key: hit for hit in report.hits}
    found = judge(load(), Evidence(facts=facts, of_log=facts, hits=hits, probes=None, flags=None))
    outcome.slowest_s = max(outcome.slowest_s, time.process_time() - began)
    outcome.peak_bytes = max(outcome.peak_bytes, tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    shown = json.dumps([[*item.evidence, report.first_error] for item in found], ensure_ascii=False)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in shown), "control characters reach the output"
    outcome.logs, outcome.log_bytes, outcome.found = (
        outcome.logs + 1,
        outcome.log_bytes + len(raw),
        outcome.found + len(found),
    )


def _config(path: Path, raw: bytes, rng: random.Random, outcome: Outcome) -> None:
    path.write_bytes(raw)
    outcome.configs += 1
    refusal = ""
    try:
        from_config(str(path), tp=rng.choice((1, 2, 4, 3)), pp=rng.choice((1, 2, 3, 8)))
    except ConfigError as error:
        refusal = str(error)
    assert "\n" not in refusal
    outcome.refused += bool(refusal)


if __name__ == "__main__":
    print(run(int(sys.argv[1]) if len(sys.argv) > 1 else 2000, int(sys.argv[2]) if len(sys.argv) > 2 else 1))
