"""Logs of the installed vLLM, really broken (break_engine.py made them): the right entry, or unknown; whole and damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from break_engine import CASES

LOGS = Path(__file__).parent / "logs"
REFUSED = "sparse-refused-on-cpu"
# What each case is to be told; None: no fault in the log.
RIGHT = {
    "stock": REFUSED,
    "stock-by-name": REFUSED,
    "stock-fp8-cache": REFUSED,
    "stock-chunked": REFUSED,
    "stock-batch-invariant": REFUSED,
    "stock-two-ranks": REFUSED,
    "ours-fp8-cache": "plugin-refuses-engine",
    "ours-bad-variable": "plugin-variable-not-allowed",
    "ours-layer-zero-shared": "schedule-not-as-the-engine-built-it",
    "indexer-weights-missing": "indexer-weights-not-loaded",
    "heads-do-not-divide": "heads-do-not-divide-by-tp",
    "cache-too-small": "no-memory-for-cache",
    "topk-zero": "config-value-not-usable",
    # vLLM 0.32.0 serves without these weights and says nothing: no log shows it.
    "attention-weights-missing": None,
    "dense-healthy": None,
    "config-cut": "unknown",
    "config-unknown-architecture": "unknown",
    "weights-rubbish": "unknown",
    "unknown-backend-name": "unknown",
    "context-too-long": "unknown",
    "no-such-option": "unknown",
    "no-such-cache-dtype": "unknown",
}


def test_every_case_has_a_log_and_an_answer():
    assert set(RIGHT) == set(CASES) == {file.stem for file in LOGS.glob("*.log")}


def told(asks, path):
    code, result = asks("--log", path)
    first = next((item["id"] for item in result["findings"] if item["standing"] == "seen"), None)
    if result["verdict"] == "healthy":
        assert code == 0
        return None
    assert code == 1
    return first if result["verdict"] == "fault" else "unknown"


@pytest.mark.parametrize("case", RIGHT)
def test_log(asks, case):
    assert told(asks, LOGS / f"{case}.log") == RIGHT[case]


def wrapped(text, _rng):
    """As a terminal of 120 columns shows it."""
    return "\n".join(
        line[start : start + 120] for line in text.splitlines() for start in range(0, max(len(line), 1), 120)
    )


def truncated(text, _rng):
    """As a log viewer that cuts at 200 columns."""
    return "\n".join(line[:200] for line in text.splitlines())


def interleaved(text, rng):
    """Among the lines of seven other workers."""
    made = []
    for line in text.splitlines():
        made.append(line)
        made += [
            f"(Worker_TP{rng.randint(1, 7)} pid=4{rng.randint(1, 7)}) INFO 11-30 04:00:00 [x.py:1] step done"
            for _ in range(rng.randint(0, 2))
        ]
    return "\n".join(made)


@pytest.mark.parametrize("damage", [wrapped, truncated, interleaved])
def test_damaged(asks, damage, tmp_path, record_property):
    right = {}
    for case, wanted in RIGHT.items():
        path = tmp_path / f"{case}.log"
        path.write_text(damage((LOGS / f"{case}.log").read_text(), random.Random(1)))
        right[case] = told(asks, path) == wanted
    record_property("right", sum(right.values()))
    print(f"\n{damage.__name__}: {sum(right.values())} of {len(right)} right")
    assert all(right.values()), [case for case, ok in right.items() if not ok]


def test_logs_name_no_place():
    for file in LOGS.glob("*.log"):
        text = file.read_text()
        assert "/root" not in text
        assert "/home" not in text
        assert len(text) < 120_000


def test_all_together(asks, tmp_path):
    """One file with every log one after another is read to its end."""
    path = tmp_path / "all.log"
    path.write_bytes(b"\n".join((LOGS / f"{case}.log").read_bytes() for case in RIGHT))
    code, result = asks("--log", path)
    assert code == 1
    seen = {item["id"] for item in result["findings"] if item["standing"] == "seen"}
    # What led to a refusal of ours is dropped, here for the logs of others as well.
    assert {answer for answer in RIGHT.values() if answer} - {"unknown", REFUSED} <= seen
