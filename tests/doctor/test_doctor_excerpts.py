"""Excerpts as people paste them (excerpts.toml): each is told its cause or unknown, whole and damaged; rates are printed."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from test_doctor_broken_engine import interleaved, truncated, wrapped

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXCERPTS = tomllib.loads(Path(__file__).with_name("excerpts.toml").read_text(encoding="utf-8"))["excerpt"]
SETS = ("public", "fresh", "later")


def whole(text, _rng):
    return text


def among_ranks(text, rng):
    """As SGLang prints it: each line behind the time and rank of its process, other ranks' lines between them."""
    made = []
    for line in text.splitlines():
        made.append(f"[2026-11-30 04:00:00 TP0] {line}")
        made += [
            f"[2026-11-30 04:00:00 TP{rng.randint(1, 7)}] Decode batch, #running-req: 2"
            for _ in range(rng.randint(0, 2))
        ]
    return "\n".join(made)


# What a damage takes away: the reasons, or the whole message, stand behind column 200; nothing says whose the bare lines
# between other workers' lines are.
LOST = {
    "truncated": {
        "half-precision-model": "no-sparse-backend",
        "json-lines-workspace": "unknown",
        "selector-shortened-by-hand": "unknown",
        "fell-back-to-transformers": "unknown",
    },
    "interleaved": {
        "eight-heads-zero-division": "unknown",
        "awq-fused-projection": "unknown",
        "cache-layout-variable": "unknown",
        "connector-counts-caches": "unknown",
        "scores-of-a-whole-prompt": "unknown",
    },
}
DAMAGE = (whole, wrapped, truncated, interleaved, among_ranks)


def told(asks, tmp_path, excerpt, damage):
    path = tmp_path / f"{excerpt['name']}.log"
    path.write_text(damage(excerpt["log"].strip("\n") + "\n", random.Random(excerpt["name"])), encoding="utf-8")
    _, result = asks("--log", path, "--static", *excerpt.get("options", ()))
    if result["verdict"] == "healthy":
        return "healthy"
    return result["findings"][0]["id"] if result["verdict"] == "fault" else "unknown"


def test_there_are_twenty_and_more():
    assert sum(excerpt["set"] == "public" for excerpt in EXCERPTS) == 20
    assert sum(excerpt["set"] == "fresh" for excerpt in EXCERPTS) >= 15
    assert sum(excerpt["set"] == "later" for excerpt in EXCERPTS) >= 50
    assert len({excerpt["name"] for excerpt in EXCERPTS}) == len(EXCERPTS)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("which", SETS)
def test_excerpts(asks, tmp_path, which, damage, record_property):
    chosen = [excerpt for excerpt in EXCERPTS if excerpt["set"] == which]
    answers = {excerpt["name"]: told(asks, tmp_path, excerpt, damage) for excerpt in chosen}
    named = [excerpt for excerpt in chosen if excerpt["label"] not in {"unknown", "healthy"}]
    found = [excerpt for excerpt in chosen if answers[excerpt["name"]] not in {"unknown", "healthy"}]
    right = [excerpt for excerpt in found if answers[excerpt["name"]] == excerpt["label"]]
    precision, recall = len(right) / max(len(found), 1), len(right) / len(named)
    print(f"\n{which}, {damage.__name__}: {len(chosen)} excerpts, precision {precision:.3f}, recall {recall:.3f}")
    record_property("precision", precision)
    record_property("recall", recall)
    wrong = {e["name"]: answers[e["name"]] for e in chosen if answers[e["name"]] != e["label"]}
    assert wrong == {name: lost for name, lost in LOST.get(damage.__name__, {}).items() if name in answers}
