"""Asks the installed vLLM itself, in a child process with a time limit, what it would choose on a device that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .candidates import INVALID, VALID, Offer, Offers, Request
from .facts import device_facts
from .selector import NOT_SPARSE

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = "SPARSE-MLA-ANSWER "
_SECONDS = 90
# Reasons that speak of what this build or environment lacks, not of the device that is asked about.
_OF_THIS_BUILD = ("Error", "not compiled", "is not available", "requires FlashInfer", "not supported on this device")


def ask(request: Request, read: Offers, seconds: float = _SECONDS) -> Offers:
    """The engine's own answers where its code runs here; ``read`` for the rest and when the child fails."""
    facts = device_facts(request.arch)
    if facts["vendor"] not in {"nvidia", "amd"}:
        return read
    answers = _answers(request, facts, seconds)
    if isinstance(answers, str):
        return replace(read, notes=(*read.notes, f"the engine's own code could not be run ({answers}): read instead"))
    stated = {offer.name: offer for offer in read.backends}
    offers = tuple(_merge(answer, stated.get(str(answer["name"]))) for answer in answers)
    kept = sum(_of_build(answer) for answer in answers)
    how = "run in a child process with a fake capability: vLLM's own selection code"
    if kept:
        how += f"; {kept} of {len(offers)} answers read from its source, because this build lacks what they import"
    return replace(read, how=how, backends=offers)


def _of_build(answer: Mapping[str, Any]) -> bool:
    return bool(answer["failed"]) or any(mark in text for text in answer["reasons"] for mark in _OF_THIS_BUILD)


def _merge(answer: Mapping[str, Any], read: Offer | None) -> Offer:
    if _of_build(answer) and read is not None:
        return read
    reasons = tuple(str(text)[:200] for text in answer["reasons"]) or ((answer["failed"],) if answer["failed"] else ())
    return Offer(
        name=str(answer["name"])[:64],
        status=INVALID if reasons else VALID,
        reasons=reasons,
        conditions=(),
        dense=NOT_SPARSE in reasons,
    )


def _answers(request: Request, facts: Mapping[str, Any], seconds: float) -> list[dict[str, Any]] | str:
    question = {
        "vendor": facts["vendor"],
        "arch": request.arch,
        "sm": facts["sm"],
        "head_size": request.head_size,
        "num_heads": request.num_heads,
        "dtype": request.dtype,
        "kv_cache_dtype": request.kv_cache_dtype,
        "block_size": request.block_size,
        "dcp": request.dcp,
        "model": {key: value for key, value in (request.model or {}).items() if isinstance(key, str)},
    }
    # The engine must not load our own plugin: it would answer for us.
    environment = {**os.environ, "SPARSE_MLA_VLLM": "off", "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "sparse_mla.doctor.selection_child"],
            input=json.dumps(question).encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds:g} s"
    except (OSError, ValueError, TypeError) as error:
        return type(error).__name__
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            return _checked(line.removeprefix(_MARK))
    tail = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"exit code {done.returncode}, {tail[:160] or 'no message'}"


def _checked(text: str) -> list[dict[str, Any]] | str:
    try:
        answers = json.loads(text)
    except ValueError:
        return "its answer is not JSON"
    shaped = isinstance(answers, list) and all(
        isinstance(item, dict) and {"name", "reasons", "failed"} <= set(item) for item in answers
    )
    return answers if shaped and answers else "its answer is empty"
