"""Log signatures: literal text with holes. Matching is a chain of ``str.find`` calls over text without whitespace, so it
takes linear time on any input and does not care where a terminal wrapped the line.

    No valid attention backend found for {device}[[ with {config}Reasons: {reasons}]]

``{name}`` takes at most 400 characters, ``{name:num}`` a number. What stands in ``[[ ]]`` may be missing: it is read when
the line was not cut there, and never needed for a match.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HOLE = 400  # characters that one hole may span, whitespace not counted
MAX_SPAN = 8192  # characters that one whole match may span
MIN_ANCHOR = 6  # shortest literal that a search may begin with

_HOLE = re.compile(r"\{([a-z_]{1,32})(?::(num|word|long))?\}")
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,9})?")
_WORD = re.compile(r"[A-Za-z0-9_.+\-]{1,80}")
_SPACE = re.compile(r"\s+")


class SignatureError(ValueError):
    """A signature is not well formed."""


def squeeze(text: str) -> str:
    """``text`` without any whitespace."""
    return _SPACE.sub("", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """A named gap between literals; ``kind`` is text, long, word or num."""

    name: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a signature was found in squeezed text, and what its holes held."""

    start: int
    end: int
    fields: dict[str, str]


class Signature:
    """One compiled signature.

    Raises:
        SignatureError: too few literal characters to search for, two holes side by side, or unbalanced brackets.
    """

    __slots__ = ("_optional", "_required", "anchor", "text")

    def __init__(self, text: str) -> None:
        required, bracket, rest = text.partition("[[")
        if bracket and not rest.endswith("]]"):
            raise SignatureError(f"{text!r}: [[ without ]] at the end")
        self.text = text
        self._required = _segments(required, text)
        self._optional = _segments(rest[:-2], text) if bracket else []
        first = self._required[0] if self._required else ""
        if not isinstance(first, str) or len(first) < MIN_ANCHOR:
            raise SignatureError(f"{text!r}: must begin with at least {MIN_ANCHOR} literal characters")
        self.anchor = first

    @property
    def num_literal(self) -> int:
        """Characters of fixed text that a match must show."""
        return sum(len(part) for part in self._required if isinstance(part, str))

    def find_all(self, squeezed: str, start: int = 0) -> Iterator[Match]:
        """Every match in ``squeezed`` from ``start`` on, not overlapping."""
        position = squeezed.find(self.anchor, start)
        while position >= 0:
            match = self._match_at(squeezed, position)
            if match is not None:
                yield match
            after = match.end if match is not None else position + len(self.anchor)
            position = squeezed.find(self.anchor, after)

    def _match_at(self, squeezed: str, position: int) -> Match | None:
        fields: dict[str, str] = {}
        limit = position + MAX_SPAN
        end = _walk(self._required, squeezed, position, limit, fields)
        if end is None:
            return None
        extra: dict[str, str] = {}
        tail = _walk(self._optional, squeezed, end, limit, extra)
        fields.update(extra)
        return Match(start=position, end=end if tail is None else tail, fields=fields)


def _segments(text: str, whole: str) -> list[str | Hole]:
    parts: list[str | Hole] = []
    position = 0
    for hole in _HOLE.finditer(text):
        literal = squeeze(text[position : hole.start()])
        if literal:
            parts.append(literal)
        elif parts and isinstance(parts[-1], Hole):
            raise SignatureError(f"{whole!r}: two holes side by side")
        parts.append(Hole(name=hole.group(1), kind=hole.group(2) or "text"))
        position = hole.end()
    literal = squeeze(text[position:])
    if literal:
        parts.append(literal)
    return parts


def _walk(parts: list[str | Hole], text: str, position: int, limit: int, fields: dict[str, str]) -> int | None:
    """End of ``parts`` read from ``position``; holes go into ``fields``, also those before the first one that fails."""
    for index, part in enumerate(parts):
        if isinstance(part, str):
            if not text.startswith(part, position):
                return None
            position += len(part)
            continue
        following = parts[index + 1] if index + 1 < len(parts) else None
        end = _hole_end(part, following, text, position, limit)
        if end is None:
            return None
        fields[part.name] = text[position:end]
        position = end
    return position


def _hole_end(hole: Hole, following: str | Hole | None, text: str, position: int, limit: int) -> int | None:
    if hole.kind in {"num", "word"}:
        match = (_NUMBER if hole.kind == "num" else _WORD).match(text, position)
        return match.end() if match else None
    longest = limit if hole.kind == "long" else min(limit, position + MAX_HOLE)
    if not isinstance(following, str):
        return min(longest, len(text))
    end = text.find(following, position, longest + len(following))
    return None if end < 0 else end
