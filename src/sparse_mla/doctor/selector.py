"""Reads vLLM's selector error: which of its many reasons is the one that blocks, and which are noise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NOT_SPARSE = "sparse not supported"
# Reasons that no setting changes: the device, or what is installed, rules the backend out.
_FIXED = (
    "compute capability not supported",
    "MLA not supported",
    "head_size not supported",
    "requires",
    "not available",
    "Error",
    "not supported on this device",
)
_BACKEND = re.compile(r"([A-Z][A-Z0-9_]{2,48}):\s{0,4}\[")
_SETTING = re.compile(r"([a-z_]{3,40})=([\w.\-']{1,64})")
_MAX_BACKENDS = 64
# The message is read without whitespace when a log was wrapped; these are the reasons that contain any.
_SQUEEZED = {
    "".join(text.split()): text
    for text in (
        NOT_SPARSE,
        "compute capability not supported",
        "MLA not supported",
        "head_size not supported",
        "dtype not supported",
        "kv_cache_dtype not supported",
        "block_size not supported",
        "batch invariance not supported",
        "KV connector not supported",
        "PCP not supported",
        "DCP not supported",
        "attention sinks not supported",
        "R-SWA not supported",
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One backend of the message. ``dense`` ones answer 'sparse not supported' and are never the reason."""

    name: str
    reasons: tuple[str, ...]

    @property
    def dense(self) -> bool:
        """Whether it does not do sparse attention at all."""
        return NOT_SPARSE in self.reasons

    @property
    def fixed(self) -> tuple[str, ...]:
        """Reasons that no setting of the user's removes."""
        return tuple(reason for reason in self.reasons if any(mark in reason for mark in _FIXED))


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What the message says. ``blocking`` is the nearest sparse backend's reasons: all that stands between it and this
    model; empty when the engine knows no sparse backend for the device at all.
    """

    settings: dict[str, str]
    candidates: tuple[Candidate, ...]
    nearest: str
    blocking: tuple[str, ...]

    @property
    def adjustable(self) -> bool:
        """Whether settings alone would make the nearest backend valid."""
        chosen = next((candidate for candidate in self.candidates if candidate.name == self.nearest), None)
        return chosen is not None and not chosen.fixed

    @property
    def sparse(self) -> bool:
        """Whether the model asked for sparse attention."""
        return self.settings.get("use_sparse") == "True"


def read(config: str, reasons: str) -> Selection:
    """Take the message apart.

    Args:
        config: the ``AttentionSelectorConfig(...)`` part, as far as it was not cut off.
        reasons: the part after ``Reasons:``; whitespace may be missing from both.
    """
    settings = {name: value.strip("'") for name, value in _SETTING.findall(config)}
    return judge(tuple(_candidates(reasons)), settings)


def judge(candidates: tuple[Candidate, ...], settings: dict[str, str]) -> Selection:
    """Which sparse backend is nearest, and what stands in its way."""
    sparse = [candidate for candidate in candidates if not candidate.dense]
    nearest = min(sparse, key=lambda candidate: (len(candidate.fixed), len(candidate.reasons)), default=None)
    return Selection(
        settings=settings,
        candidates=candidates,
        nearest=nearest.name if nearest else "",
        blocking=_blocking(nearest) if nearest else (),
    )


def _blocking(nearest: Candidate) -> tuple[str, ...]:
    """A fixed reason decides; beside it the adjustable ones are noise, since changing them would not help."""
    return nearest.fixed or nearest.reasons


def _candidates(text: str) -> list[Candidate]:
    found: list[Candidate] = []
    for match in _BACKEND.finditer(text):
        end = _closing(text, match.end())
        parts = tuple(_words(part) for part in _split(text[match.end() : end]))
        found.append(Candidate(name=match.group(1), reasons=tuple(part for part in parts if part)))
        if len(found) == _MAX_BACKENDS:
            break
    return found


def _closing(text: str, start: int) -> int:
    """Index of the ``]`` that ends a reason list; a cut message ends it, too."""
    depth = 1
    for index in range(start, min(len(text), start + 4000)):
        depth += {"[": 1, "]": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return min(len(text), start + 4000)


def _split(text: str) -> Sequence[str]:
    """Parts between commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(char, 0)
        if char == "," and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _words(reason: str) -> str:
    bare = reason.strip().strip("'\"")
    return _SQUEEZED.get("".join(bare.split()), bare)[:200]
