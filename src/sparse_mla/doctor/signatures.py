"""Log signatures: literal text with holes. Matching is a chain of ``str.find`` calls over text without whitespace, so it
takes linear time on any input and does not care where a terminal wrapped the line.

    No valid attention backend found for {device}[[ with {config}Reasons: {reasons}]]

``{name}`` takes at most 400 characters, ``{name:num}`` a number, ``{name:version}`` a version. What stands in ``[[ ]]`` may be missing: it is read when
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

_HOLE = re.compile(r"\{([a-z_]{1,32})(?::(num|word|version|long))?\}")
_NUMBER = re.compile(r"\d{1,18}(?:\.\d{1,9})?")
_WORD = re.compile(r"[A-Za-z0-9_.+\-]{1,80}")
# Without its local part: in text without whitespace nothing would end that.
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,6}){1,3}(?:(?:rc|a|b)\d{1,4})?(?:\.(?:post|dev)\d{1,6}){0,2}")
_SPACE = re.compile(r"\s+")


class SignatureError(ValueError):
    """A signature is not well formed."""


_PATTERNS = {"num": _NUMBER, "word": _WORD, "version": _VERSION}


def squeeze(text: str) -> str:
    """``text`` without any whitespace."""
    return _SPACE.sub("", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hole:
    """A named gap between literals; ``kind`` is text, long, word, version or num."""

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

    __slots__ = ("_num_needed", "_parts", "anchor", "text")

    def __init__(self, text: str) -> None:
        required, bracket, rest = text.partition("[[")
        if bracket and not rest.endswith("]]"):
            raise SignatureError(f"{text!r}: [[ without ]] at the end")
        self.text = text
        needed = _segments(required, text)
        self._parts = [*needed, *(_segments(rest[:-2], text) if bracket else ())]
        self._num_needed = len(needed)
        first = needed[0] if needed else ""
        if not isinstance(first, str) or len(first) < MIN_ANCHOR:
            raise SignatureError(f"{text!r}: must begin with at least {MIN_ANCHOR} literal characters")
        self.anchor = first

    @property
    def num_literal(self) -> int:
        """Characters of fixed text that a match must show."""
        return sum(len(part) for part in self._parts[: self._num_needed] if isinstance(part, str))

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
        end, limit = position, position + MAX_SPAN
        for index, part in enumerate(self._parts):
            following = self._parts[index + 1] if index + 1 < len(self._parts) else None
            cut = index == self._num_needed - 1  # what follows may be missing
            after = _part_end(part, following, squeezed, end, limit, cut=cut)
            if after is None:
                if index < self._num_needed:
                    return None
                break
            if isinstance(part, Hole):
                fields[part.name] = squeezed[end:after]
            end = after
        return Match(start=position, end=end, fields=fields)


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


def _part_end(
    part: str | Hole, following: str | Hole | None, text: str, position: int, limit: int, *, cut: bool
) -> int | None:
    """End of ``part`` at ``position``, or None when it is not there. ``cut``: a text hole may run on to the limit."""
    if isinstance(part, str):
        return position + len(part) if text.startswith(part, position) else None
    if part.kind in _PATTERNS:
        match = _PATTERNS[part.kind].match(text, position)
        return match.end() if match else None
    longest = limit if part.kind == "long" else min(limit, position + MAX_HOLE)
    end = text.find(following, position, longest + len(following)) if isinstance(following, str) else -1
    if end >= 0:
        return end
    return min(longest, len(text)) if cut or following is None else None
