"""The knowledge base: defects as data, read from ``defects/*.toml`` and checked against the schema on loading."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from ..errors import UsageError
from .expressions import Expression, ExpressionError
from .signatures import Signature, SignatureError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUPS = ("gate", "heads", "memory", "indices", "topk", "layout", "dtype", "semantics", "parallel")
# In order of weight: what a reader must act on first stands first.
SEVERITIES = ("wrong-output", "refuses", "crash", "hang", "memory", "slow", "note")
# How the version range is known: read in the sources, stated in a report, or inferred from the dates of reports.
BASES = ("read", "stated", "inferred")
COMMON = ("", "models", "programs")
ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers", "aiter", "deep-gemm", "flashinfer", "any")

_ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+){1,9}")
_REFERENCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")
_MAX_TEXT = 2000
_MIN_LITERAL = 12  # characters of fixed text without which a message identifies nothing


class KnowledgeError(ValueError):
    """An entry of the knowledge base breaks the schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """One way out. ``flags`` are options, environment variables or config fields of the engine that the command uses:
    a version that lacks one is never offered the remedy. ``approximate``: the output is no longer what the model defines.
    """

    do: str
    command: str = ""
    flags: tuple[str, ...] = ()
    approximate: bool = False
    when: Expression | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Evidence that must (or must not) lead to the entry: log text, facts, probe results."""

    log: str
    facts: Mapping[str, Any]
    probes: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Defect:
    """One known fault.

    Attributes:
        versions: versions of ``engine`` that have it; empty when nobody stated them.
        packages: versions of other packages that it needs.
        basis: how that range is known: "read" in the sources, "stated" in a report, "inferred" from dates.
        device, config: predicates over facts; None when every device or config is touched.
        signatures: log messages that show it.
        selector_reason: the answer of one sparse backend in a selector error that this entry explains, when nothing else
            keeps that backend from running.
        check: condition on the numbers in a signature's holes, for messages that others print, too.
        supersedes: entries that are no cause where this one's message stands: they led to it.
        covered: the plugin of this package removes the fault by itself where it is active.
        common: who else prints the messages. "models": engines, for any model; they do not count where the model is known
            not to be a DSA model. "programs": whoever uses torch or the compiler; they count only where something shows
            an engine. "": nobody.
        symptom: the messages follow from any of several faults; one with a cause beside it explains them.
        probe: name of the source probe that decides it (see audit).
        threshold: prompt tokens from which on it can show.
    """

    id: str
    title: str
    group: str
    severity: str
    engine: str
    versions: SpecifierSet
    packages: Mapping[str, SpecifierSet]
    basis: str
    device: Expression | None
    config: Expression | None
    signatures: tuple[Signature, ...]
    selector_reason: str
    check: Expression | None
    supersedes: tuple[str, ...]
    covered: bool
    common: str
    symptom: bool
    probe: str
    threshold: Expression | None
    cause: str
    proof: str
    remedies: tuple[Remedy, ...]
    does_not_help: tuple[str, ...]
    references: tuple[str, ...]
    positive: Example
    negative: Example

    def applies(self, facts: Mapping[str, Any], *, versions: bool = True) -> bool | None:
        """Whether engine, versions, device and config of ``facts`` are among those touched; None when unknown.

        Args:
            versions: False leaves the engine's version out, for when its code was read.
        """
        answers: list[bool | None] = []
        if self.engine != "any":
            answers.append(None if facts.get("engine") is None else facts["engine"] == self.engine)
        if versions and self.engine != "any":
            answers.append(in_range(facts.get(f"version:{self.engine}"), self.versions))
        answers += [in_range(facts.get(f"version:{name}"), specifier) for name, specifier in self.packages.items()]
        answers += [rule.holds(facts) for rule in (self.device, self.config) if rule is not None]
        if False in answers:
            return False
        return None if None in answers else True


def in_range(version: object, specifier: SpecifierSet | str) -> bool | None:
    """Whether ``version`` is within ``specifier``; None when it is unknown or no version."""
    if not str(specifier):
        return True
    try:
        return Version(str(version)) in SpecifierSet(str(specifier), prereleases=True) if version else None
    except InvalidVersion:
        return None


@lru_cache(maxsize=1)
def load() -> tuple[Defect, ...]:
    """Every entry of the packaged knowledge base, in file and entry order.

    Raises:
        KnowledgeError: an entry breaks the schema, or an id occurs twice.
    """
    entries: dict[str, Defect] = {}
    folder = files(__package__).joinpath("defects")
    for file in sorted((item for item in folder.iterdir() if item.name.endswith(".toml")), key=lambda item: item.name):
        for defect in parse(file.read_text(encoding="utf-8"), group=file.name.removesuffix(".toml")):
            if defect.id in entries:
                raise KnowledgeError(f"{defect.id}: id occurs twice")
            entries[defect.id] = defect
    return tuple(entries.values())


def find(identifier: str) -> Defect:
    """The entry called ``identifier``.

    Raises:
        UsageError: there is none; the message lists ids that look alike.
    """
    for defect in load():
        if defect.id == identifier:
            return defect
    words = set(identifier.lower().split("-"))
    alike = sorted(load(), key=lambda defect: -len(words & set(defect.id.split("-"))))[:4]
    raise UsageError(
        "unknown defect id",
        needs=", ".join(defect.id for defect in alike) + " or another one",
        got=repr(identifier[:80]),
        hint="`sparse-mla explain` without an id lists all.",
    )


def parse(text: str, *, group: str) -> tuple[Defect, ...]:
    """Entries of one TOML document.

    Raises:
        KnowledgeError: not TOML, or an entry breaks the schema.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise KnowledgeError(f"{group}: {error}") from None
    if set(document) != {"defect"} or group not in GROUPS:
        raise KnowledgeError(f"{group}: needs a group of {GROUPS} and only [[defect]] tables")
    return tuple(_defect(raw, group) for raw in document["defect"])


def _defect(raw: Mapping[str, Any], group: str) -> Defect:
    name = str(raw.get("id", "?"))
    known = {field.name for field in fields(Defect)} - {"group"}
    needed = {"id", "title", "severity", "engine", "cause", "proof", "remedies", "references", "positive", "negative"}
    if set(raw) - known or needed - set(raw):
        raise KnowledgeError(f"{name}: unknown {sorted(set(raw) - known)}, missing {sorted(needed - set(raw))}")
    try:
        defect = Defect(
            group=group,
            **{key: _text(raw, key) for key in ("id", "title", "severity", "engine", "cause", "proof")},
            versions=SpecifierSet(raw.get("versions", "")),
            packages={key: SpecifierSet(value) for key, value in raw.get("packages", {}).items()},
            basis=str(raw.get("basis", BASES[-1])),
            device=_expression(raw, "device"),
            config=_expression(raw, "config"),
            signatures=tuple(Signature(text) for text in raw.get("signatures", ())),
            selector_reason=str(raw.get("selector_reason", "")),
            check=_expression(raw, "check"),
            supersedes=tuple(raw.get("supersedes", ())),
            covered=raw.get("covered", False) is True,
            common=str(raw.get("common", "")),
            symptom=raw.get("symptom", False) is True,
            probe=str(raw.get("probe", "")),
            threshold=_expression(raw, "threshold"),
            remedies=tuple(_remedy(name, item) for item in raw["remedies"]),
            does_not_help=tuple(str(item) for item in raw.get("does_not_help", ())),
            references=tuple(str(item) for item in raw["references"]),
            positive=_example(name, raw["positive"]),
            negative=_example(name, raw["negative"]),
        )
    except (SignatureError, ExpressionError, InvalidSpecifier, TypeError, AttributeError) as error:
        raise KnowledgeError(f"{name}: {error}") from None
    _check(defect)
    return defect


def _check(defect: Defect) -> None:
    problems = [
        (not _ID.fullmatch(defect.id), "id must be lower-case words joined by hyphens"),
        (defect.severity not in SEVERITIES, f"severity must be one of {SEVERITIES}"),
        (defect.engine not in ENGINES, f"engine must be one of {ENGINES}"),
        (not defect.remedies, "needs a remedy"),
        (not all(_REFERENCE.fullmatch(item) for item in defect.references), "references are owner/name#number"),
        (
            any(item.num_literal < _MIN_LITERAL for item in defect.signatures),
            f"needs {_MIN_LITERAL} literal characters",
        ),
        (defect.common not in COMMON, f"common must be one of {COMMON}"),
        (defect.basis not in BASES, f"basis must be one of {BASES}"),
        (not any(_ways_to(defect)), "nothing leads to it"),
        (len(defect.cause) > _MAX_TEXT or len(defect.proof) > _MAX_TEXT, f"texts are at most {_MAX_TEXT} characters"),
    ]
    for broken, message in problems:
        if broken:
            raise KnowledgeError(f"{defect.id}: {message}")


def _ways_to(defect: Defect) -> tuple[object, ...]:
    return (
        defect.signatures,
        defect.selector_reason,
        defect.probe,
        str(defect.versions),
        defect.packages,
        defect.config,
    )


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw[key]
    if not isinstance(value, str) or not value.strip():
        raise KnowledgeError(f"{raw.get('id', '?')}: {key} must be text")
    return " ".join(value.split())


def _expression(raw: Mapping[str, Any], key: str) -> Expression | None:
    return Expression(raw[key]) if raw.get(key) else None


def _remedy(name: str, raw: Mapping[str, Any]) -> Remedy:
    if set(raw) - {"do", "command", "flags", "approximate", "when"}:
        raise KnowledgeError(f"{name}: unknown remedy keys {sorted(raw)}")
    return Remedy(
        do=_text(raw, "do"),
        command=str(raw.get("command", "")),
        flags=tuple(raw.get("flags", ())),
        approximate=raw.get("approximate", False) is True,
        when=_expression(raw, "when"),
    )


def _example(name: str, raw: Mapping[str, Any]) -> Example:
    if set(raw) - {"log", "facts", "probes"} or not raw:
        raise KnowledgeError(f"{name}: an example has log, facts or probes")
    return Example(log=raw.get("log", ""), facts=raw.get("facts", {}), probes=raw.get("probes", {}))
