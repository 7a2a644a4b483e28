"""What is asked (a probe) and what came of it (an outcome), and the file that keeps a run."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...errors import UsageError
from ..report import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = "sparse-mla/endpoint-run/1"
STATES = {
    "cold": "new prompts",
    "repeat": "the same prompts again",
    "prefix": "behind a shared first half",
    "concurrent": "among other requests",
    "beside": "those other requests",
}
"""What a sweep asks, in words for people."""
_MAX_FILE_BYTES = 256 << 20
_SETTINGS: dict[str, type | tuple[type, ...]] = {
    "seed": int,
    "lengths": (list, type(None)),
    "index_topk": int,
    "chunk_tokens": (int, type(None)),
    "style_sha256": str,
    "concurrency": int,
}


class StoppedError(Exception):
    """The run ends early; what was asked so far stands. ``str()`` says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One question to the server.

    Attributes:
        state: cold, repeat (the same prompt again), prefix (first half as in an earlier prompt), concurrent, beside
            (a neighbour of a concurrent one), staged (sent in growing pieces).
        length: tokens asked for.
        attempt: 0, or more when a failure is asked again with other facts.
        server: 0 for ``--endpoint``, 1 for a second one.
        of: for prefix, the length of the cold probe whose beginning it shares; for beside, the length of the concurrent
            one; for staged, the number of pieces.
    """

    state: str
    length: int
    attempt: int = 0
    server: int = 0
    of: int = 0

    @property
    def key(self) -> str:
        """Stable name of the probe in files: ``1:staged/20000/of-3/0``."""
        of = f"/of-{self.of}" if self.of else ""
        return f"{self.server}:{self.state}/{self.length}{of}/{self.attempt}"

    @property
    def title(self) -> str:
        """The probe in words."""
        again = f", again ({self.attempt})" if self.attempt else ""
        where = ", second endpoint" if self.server else ""
        pieces = f" in {self.of} pieces" if self.state == "staged" else ""
        return f"{self.length:,} tokens {self.state}{pieces}{again}{where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one probe gave.

    Attributes:
        failure: kind of the failed exchange, or empty when there was an answer; ``detail`` says more.
        prompt_tokens: the server's count, or ours where it gives none (``counted`` is then False).
        facts: label, start and whether the answer held the value, by depth.
        invented: number of values in the answer that were never planted.
        tokens, token_kind, logprobs: as in an Answer.
    """

    failure: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    counted: bool = False
    completion_tokens: int = 0
    cached_tokens: int | None = None
    seconds: float = 0.0
    tries: int = 1
    finish: str = ""
    facts: tuple[tuple[str, int, bool], ...] = ()
    invented: int = 0
    prompt_sha256: str = ""
    tokens: tuple[str, ...] = ()
    token_kind: str = ""
    logprobs: tuple[float, ...] = ()
    text: str = ""

    @property
    def answered(self) -> bool:
        """Whether there was a usable answer, right or wrong."""
        return not self.failure

    @property
    def recalled(self) -> int:
        """Planted facts that the answer held."""
        return sum(found for _, _, found in self.facts)

    @property
    def recall(self) -> float:
        """Share of the planted facts that the answer held; 0 without an answer."""
        return self.recalled / len(self.facts) if self.facts else 0.0

    def passes(self, least: float) -> bool:
        """Set equality; ``least`` < 1 allows that share, and at least one fact, to a model that is weak by itself."""
        allowed = max(1, math.floor((1 - least) * len(self.facts) + 1e-9)) if least < 1 else 0
        return self.answered and len(self.facts) - self.recalled <= allowed and self.invented <= allowed

    @property
    def token_sha256(self) -> str:
        """Hash of the answer's tokens and of what they are."""
        return hashlib.sha256(json.dumps([self.token_kind, *self.tokens]).encode()).hexdigest()

    @property
    def logprob_sha256(self) -> str | None:
        """Hash of the log probabilities, or None without any."""
        return hashlib.sha256(json.dumps(self.logprobs).encode()).hexdigest() if self.logprobs else None


@dataclass(kw_only=True, slots=True)
class Book:
    """All outcomes of a run and what decided its prompts; kept in one JSON file that is written after every answer.

    ``settings`` make the prompts what they are: seed, lengths, style, mode. No key, URL or prompt text is kept.
    """

    settings: Mapping[str, Any]
    servers: list[dict[str, Any]] = field(default_factory=list)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    path: Path | None = None

    def keep(self, probe: Probe, outcome: Outcome) -> None:
        """Enter an outcome and write the file."""
        self.outcomes[probe.key] = outcome
        self.write()

    def write(self) -> None:
        """Replace the file in one step.

        Raises:
            StoppedError: that is not possible any more; the book is kept in memory only from then on.
        """
        if self.path is None:
            return
        content = {
            "schema": SCHEMA,
            "version": __version__,
            "settings": dict(self.settings),
            "servers": self.servers,
            "outcomes": {key: asdict(outcome) for key, outcome in self.outcomes.items()},
        }
        try:
            write_whole(self.path, json.dumps(content, allow_nan=False).encode())
        except OSError as error:
            path, self.path = self.path, None
            raise StoppedError(f"the run cannot be saved to {path}: {error.strerror}") from None


def read_book(option: str, path: Path) -> Book:
    """A run from its file.

    Raises:
        UsageError: it cannot be read or is no such file.
    """
    needs = f"a file written by --save (schema {SCHEMA})"
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UsageError(option, needs=needs, got=f"{path}: too large")
        content = json.loads(path.read_bytes())
        if content["schema"] != SCHEMA:
            raise UsageError(option, needs=needs, got=f"{path}: schema {content['schema']!r}")
        outcomes = {str(key): _outcome(entry) for key, entry in content["outcomes"].items()}
        settings = dict(content["settings"])
        for name, kinds in _SETTINGS.items():
            if not isinstance(settings[name], kinds):
                raise UsageError(option, needs=needs, got=f"{path}: {name} {settings[name]!r}")
        return Book(settings=settings, servers=list(content["servers"]), outcomes=outcomes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(option, needs=needs, got=f"{path}: {error}") from None


def _outcome(entry: dict[str, Any]) -> Outcome:
    values = {one.name: entry[one.name] for one in fields(Outcome)}
    for name in ("tokens", "logprobs"):
        values[name] = tuple(values[name])
    values["facts"] = tuple((str(label), int(start), bool(found)) for label, start, found in values["facts"])
    return Outcome(**values)
