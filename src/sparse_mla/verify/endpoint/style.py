"""What a prompt says: facts, filler and question, as data. A model with a vocabulary of its own brings its own style.

Filler words come in groups of one length, so that a tokenizer without them as whole tokens still gives each word of a
group the same number of tokens. Which group is used is measured, never assumed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    import random

_NAMES = (
    "amber anchor apple arrow basket beacon bishop bottle bridge bronze button cabin camel candle canyon carbon castle cedar "
    "cherry circle cobalt coffee copper coral cotton crystal desert diamond dragon eagle ember falcon feather forest garden "
    "ginger glacier hammer harbor hazel island ivory jacket jasmine kettle ladder lantern lemon lion magnet maple marble "
    "meadow mirror ocean olive orange orchid panda paper pearl pepper planet quartz rabbit ribbon river rocket saddle salmon "
    "silver spider summit temple tiger tunnel valley velvet violet walnut whale willow window winter yellow zebra"
)
_FILLER = (
    (
        "all and any but can day did for get had has her him his how its let may new not now off old one our out own per put "
        "run say see set she sit six ten the too top try two use was way who why yes yet you"
    ),
    (
        "back been best both come done each even ever find four give good hand have head help here high home hour into just "
        "keep kind know last left life like line long look made make many more most much must near need next only open over "
        "part real rest road room same seem show side some such sure take tell than that them then they time turn upon very "
        "want well went were what when will with word work year your"
    ),
    (
        "about above after again along among being below bring carry cause clear could doing early every field first found "
        "great group heard house large later learn leave light might money never night often order other place plant point "
        "power right round shall short since small sound space start state still story study their there these thing think "
        "those three today under until using voice water where which while white whole world would write young"
    ),
)
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """A way to plant facts and to ask for them.

    Attributes:
        preamble: start of the prompt; ``{nonce}`` stands where random words make it new to every cache.
        fact: one planted fact, with ``{name}`` and ``{value}``.
        question: end of the prompt, with ``{names}`` (ask all) or ``{name}`` (ask each).
        ask: ``all`` facts in one answer, or ``each`` in a request of its own over the same prompt.
        names: what facts are about.
        values: words a value is taken from; empty for random numbers of ``digits`` digits.
        filler: groups of words between the facts.
        stop: where a completion ends, for servers of plain completions.
    """

    preamble: str
    fact: str
    question: str
    ask: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    digits: int
    filler: tuple[tuple[str, ...], ...]
    stop: tuple[str, ...]

    def pairs(self, count: int, source: random.Random) -> list[tuple[str, str]]:
        """``count`` (name, value) pairs without repetition, in random order."""
        names = source.sample(self.names, count)
        if self.values:
            return list(zip(names, source.sample(self.values, count), strict=True))
        low = 10 ** (self.digits - 1)
        return list(zip(names, map(str, source.sample(range(low, 10 * low), count)), strict=True))

    @property
    def most_facts(self) -> int:
        """Most facts that one prompt can hold without repetition."""
        return min(len(self.names), len(self.values) or len(self.names))

    def found(self, answer: str) -> list[str]:
        """Every value that stands in an answer, in order."""
        if self.values:
            known = set(self.values)
            return [word for word in re.findall(r"\w+", answer) if word in known]
        joined = re.sub(r"(?<![\d,])(\d{1,3})((?:,\d{3})+)(?![\d,])", lambda match: match[0].replace(",", ""), answer)
        return re.findall(rf"(?<!\d)\d{{{self.digits}}}(?!\d)", joined)


DEFAULT = Style(
    preamble="Session {nonce}. Below is filler text with a few records in it. Only the records matter.",
    fact=" Record: the code of {name} is {value}.",
    question=" That was the text. Write down the code of each of these names, one per line, as name: code. "
    "Names: {names}\nCodes:\n",
    ask="all",
    names=tuple(_NAMES.split()),
    values=(),
    digits=6,
    filler=tuple(tuple(group.split()) for group in _FILLER),
    stop=("\n\n",),
)


def load(path: str) -> Style:
    """A style from a JSON file with the attributes of ``Style``; what is left out is as in the default.

    Raises:
        UsageError: the file cannot be read or does not describe a style.
    """
    try:
        content = Path(path).read_bytes()[: _MAX_FILE_BYTES + 1]
        given = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError("--style", needs="a JSON file", got=f"{path}: {error}") from None
    known = set(Style.__dataclass_fields__)
    if not isinstance(given, dict) or not set(given) <= known:
        raise UsageError("--style", needs=f"an object with keys among {', '.join(sorted(known))}", got=path)
    fields: dict[str, Any] = {name: getattr(DEFAULT, name) for name in known}
    for name, value in given.items():
        fields[name] = _field(name, value, fields[name])
    style = Style(**fields)
    _check(style)
    return style


def _field(name: str, value: Any, like: Any) -> Any:
    if isinstance(like, tuple):
        if name == "filler" and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = [value]
        if name == "filler" and isinstance(value, list):
            return tuple(_words(name, group) for group in value)
        return _words(name, value)
    if type(value) is not type(like):
        raise UsageError(f"--style {name}", needs=type(like).__name__, got=type(value).__name__)
    return value


def _words(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f"--style {name}", needs="a list of words", got=type(value).__name__)
    return tuple(dict.fromkeys(value))


def _check(style: Style) -> None:
    asked = "{names}" if style.ask == "all" else "{name}"
    wrong = [
        text
        for text, holds in (
            ("preamble with {nonce}", "{nonce}" in style.preamble),
            ("fact with {name} and {value}", "{name}" in style.fact and "{value}" in style.fact),
            ("ask: all or each", style.ask in {"all", "each"}),
            (f"question with {asked}", asked in style.question),
            ("digits from 3 to 12", bool(style.values) or 3 <= style.digits <= 12),
            ("at least 4 names and values", style.most_facts >= 4),
            ("filler groups of at least 8 words", bool(style.filler) and min(map(len, style.filler)) >= 8),
        )
        if not holds
    ]
    if wrong:
        raise UsageError("--style", needs="; ".join(wrong), got="a style without")
