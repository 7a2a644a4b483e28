"""Recall by prompt length and depth of the fact, as rows of text and as an SVG picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .outcome import Outcome
    from .verdicts import Edge

BINS = 10
LEGEND = "■ all recalled, ▣ some, □ none, · no fact planted there; equal letters: the same answer to the same prompt"
_ALL, _SOME, _NONE, _EMPTY = "■", "▣", "□", "·"
_CELL, _ROW, _LEFT, _TOP, _GROUPS = 44, 22, 240, 64, 110
_GROUP_COLOURS = ("#4477aa", "#ee6677", "#ccbb44", "#228833", "#aa3377", "#66ccee")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One answered probe of ``server``. ``bins[i]`` is (recalled, planted) of the facts in the i-th tenth of the prompt.

    ``group`` numbers the different answers to a prompt that was asked more than once; None for any other prompt.
    """

    name: str
    server: int
    length: int
    bins: tuple[tuple[int, int], ...]
    group: int | None

    @property
    def letter(self) -> str:
        """A, B, ... of its answer among those to the same prompt; empty where there is none to compare with."""
        return "" if self.group is None else chr(ord("A") + self.group % 26)

    def marks(self) -> str:
        """One sign for each tenth of the prompt."""
        return " ".join(
            _EMPTY if not planted else _ALL if found == planted else _SOME if found else _NONE
            for found, planted in self.bins
        )


def rows(outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Answered probes by endpoint and length; unanswered ones have no row."""
    answers: dict[str, list[str]] = {}
    asked = Counter(outcome.prompt_sha256 for outcome in outcomes.values() if outcome.answered)
    made = []
    for key, outcome in outcomes.items():
        if not outcome.answered:
            continue
        known = answers.setdefault(outcome.prompt_sha256, [])
        if outcome.token_sha256 not in known:
            known.append(outcome.token_sha256)
        group = known.index(outcome.token_sha256) if asked[outcome.prompt_sha256] > 1 else None
        made.append(
            Row(
                name=name(key),
                server=int(key.partition(":")[0]),
                length=outcome.prompt_tokens,
                bins=_bins(outcome),
                group=group,
            )
        )
    return sorted(made, key=lambda row: (row.server, row.length))


def name(key: str) -> str:
    """``0:staged/20000/of-3/1`` -> ``staged of 3, again``; the second endpoint says so."""
    server, _, rest = key.partition(":")
    state, _, *of, attempt = rest.split("/")
    pieces = f" {of[0].replace('-', ' ')}" if of and state == "staged" else ""
    return f"{state}{pieces}{', again' if attempt != '0' else ''}{', second' if server != '0' else ''}"


def _bins(outcome: Outcome) -> tuple[tuple[int, int], ...]:
    found, planted = [0] * BINS, [0] * BINS
    for _, start, recalled in outcome.facts:
        place = min(start * BINS // max(outcome.prompt_tokens, 1), BINS - 1)
        planted[place] += 1
        found[place] += recalled
    return tuple(zip(found, planted, strict=True))


def svg(made: Sequence[Row], edges: Sequence[Edge | None], chunks: Sequence[int | None], title: str) -> str:
    """The picture: a row for each probe, the failing length as a line, chunk boundaries as ticks, answers by colour.

    ``edges`` and ``chunks`` have an entry for each endpoint.
    """
    width, height = _LEFT + BINS * _CELL + _GROUPS, _TOP + len(made) * _ROW + 98
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 22, title, size=15),
        _text(_LEFT + BINS * _CELL + 14, _TOP - 8, "same answer"),
        _text(12, _TOP - 8, "prompt tokens, state"),
    ]
    drawn += [_text(_LEFT + tenth * _CELL, _TOP - 8, f"{tenth * 10} %") for tenth in range(BINS)]
    for number, row in enumerate(made):
        drawn += _row(row, _TOP + number * _ROW, chunks[row.server])
    for server, edge in enumerate(edges):
        if edge is None:
            continue
        above = sum(row.server < server or (row.server == server and row.length < edge.fails) for row in made)
        y = _TOP + above * _ROW - 1
        drawn.append(
            f'<line x1="8" x2="{width - 8}" y1="{y}" y2="{y}" stroke="black" stroke-width="2" stroke-dasharray="6 4"/>'
        )
    told = " and ".join(f"{chunk:,}" for chunk in chunks if chunk)
    begins = " and ".join(str(edge) for edge in edges if edge)
    notes = (
        "across: depth of the fact in the prompt; blue: recalled, red: lost, white: no fact planted there",
        f"{f'dashed: the failure begins {begins}' if begins else 'no failing length was found'}",
        f"ticks: chunks of {told} tokens" if told else "no ticks: the size of chunks is not known (--chunk-tokens)",
        "equal letters and colours: the same answer to the same prompt; another letter is no fault by itself",
    )
    foot = _TOP + len(made) * _ROW + 24
    drawn += [_text(12, foot + 18 * number, note) for number, note in enumerate(notes)]
    return "\n".join([*drawn, "</svg>", ""])


def _row(row: Row, y: int, chunk: int | None) -> Iterable[str]:
    yield _text(12, y + 15, f"{row.length:,} {row.name}")
    for place, (found, planted) in enumerate(row.bins):
        colour = _colour(found / planted) if planted else "#ffffff"
        yield (
            f'<rect x="{_LEFT + place * _CELL}" y="{y}" width="{_CELL - 2}" height="{_ROW - 3}" fill="{colour}" '
            f'stroke="#cccccc"><title>{found} of {planted}</title></rect>'
        )
    for boundary in range(chunk, row.length, chunk) if chunk else ():
        x = _LEFT + BINS * _CELL * boundary / row.length
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + _ROW - 3}" stroke="black" stroke-width="1"/>'
    if row.group is None:
        return
    colour = _GROUP_COLOURS[row.group % len(_GROUP_COLOURS)]
    yield f'<rect x="{_LEFT + BINS * _CELL + 14}" y="{y}" width="{_ROW - 3}" height="{_ROW - 3}" fill="{colour}"/>'
    yield _text(_LEFT + BINS * _CELL + 40, y + 15, row.letter)


def _colour(share: float) -> str:
    """From red (0) over sand (a half) to blue (1); white stays for no fact."""
    lost, half, kept = (178, 24, 43), (240, 220, 160), (33, 102, 172)
    end, weight = (kept, 2 * share - 1) if share >= 0.5 else (lost, 1 - 2 * share)
    return "#" + "".join(f"{round(mid + (part - mid) * weight):02x}" for mid, part in zip(half, end, strict=True))


def _text(x: int, y: int, text: str, size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
