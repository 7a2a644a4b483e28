"""Findings: which entries of the knowledge base the evidence leads to, how firmly, and in which order to read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from .audit import FAULTY
from .knowledge import SEVERITIES
from .selector import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .audit import Probe
    from .knowledge import Defect, Remedy
    from .logs import Hit
    from .selector import Selection

_WHOLE = re.compile(r"\d{1,18}")


class Standing(str, Enum):
    """How an entry stands: its message is in the log; its code is in the source; the facts fit and nothing denies it."""

    SEEN = "seen in the log"
    READ = "read in the source"
    POSSIBLE = "possible: fits these facts"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One diagnosis. ``evidence`` are lines of the log or places in the source; ``threshold`` is in prompt tokens."""

    defect: Defect
    standing: Standing
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    threshold: int | None
    line: int

    @property
    def symptom(self) -> bool:
        return self.defect.symptom


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that was gathered, in the form in which entries are judged.

    Attributes:
        facts: everything known; of_log: only what concerns the machine that wrote the log.
        hits: the log's hits by defect id; None when no log was given.
        probes: answers of the source audit by id; None when no source was found.
        flags: options that the engine's source knows; None when no source was found.
    """

    facts: Mapping[str, Any]
    of_log: Mapping[str, Any]
    hits: Mapping[str, Hit] | None
    probes: Mapping[str, Probe] | None
    flags: frozenset[str] | None
    plugin_active: bool = False


def selection(hit: Hit | None) -> Selection | None:
    """The selector error behind a hit of its signature, taken apart."""
    if hit is None or "reasons" not in hit.fields:
        return None
    parsed = read(
        f"head_size={hit.fields.get('head_size', '')}, kv_cache_dtype={hit.fields.get('kv', '')},"
        f" dtype={hit.fields.get('dtype', '')}, block_size={hit.fields.get('block', '')}, {hit.fields.get('config', '')}",
        hit.fields["reasons"],
    )
    return parsed if parsed.candidates else None


def judge(defects: Sequence[Defect], evidence: Evidence) -> list[Finding]:
    """Every entry that the evidence leads to, what to read first standing first."""
    selector_hit = (evidence.hits or {}).get("no-sparse-backend")
    chosen = selection(selector_hit)
    found = [finding for defect in defects if (finding := _judge_one(defect, evidence, chosen, selector_hit)) is not None]
    if chosen is not None and any(finding.defect.selector_reason for finding in found if finding.standing is Standing.SEEN):
        # A setting alone blocks: that is the cause, and "no backend for this device" is not true.
        found = [finding for finding in found if finding.defect.id != "no-sparse-backend"]
    if chosen is not None and chosen.settings.get("use_sparse") == "False":
        found = [finding for finding in found if finding.defect.id != "no-sparse-backend"]
    return sorted(found, key=_weight)


def _weight(finding: Finding) -> tuple[int, int, int]:
    severity = SEVERITIES.index(finding.defect.severity)
    seen = finding.standing is Standing.SEEN
    if seen and not finding.symptom and finding.defect.severity not in {"slow", "note"}:
        return 0, finding.line, severity
    if finding.standing is Standing.READ and finding.defect.severity not in {"slow", "note"}:
        return 1, severity, finding.line
    if seen:
        return 2 if finding.symptom else 3, severity, finding.line
    return 4 if finding.standing is Standing.READ else 5, severity, finding.line


def _judge_one(
    defect: Defect, evidence: Evidence, chosen: Selection | None, selector_hit: Hit | None
) -> Finding | None:
    hit = (evidence.hits or {}).get(defect.id)
    probe = (evidence.probes or {}).get(defect.probe)
    if _explains(defect, chosen) and selector_hit is not None and chosen is not None:
        text = f"{chosen.nearest} would run but for: {', '.join(chosen.blocking)}"
        return _finding(defect, Standing.SEEN, evidence, (_log_line(selector_hit), text), selector_hit.line)
    if hit is not None:
        standing = _standing_of_hit(defect, hit, evidence)
        if standing is not None:
            lines = [_log_line(hit), *_selector_lines(defect, chosen), *_number_lines(hit)]
            if probe is not None:
                lines.append(f"source: {probe.what} ({probe.where or probe.status})")
            return _finding(defect, standing, evidence, tuple(lines), hit.line)
    if probe is None:
        return _possible(defect, evidence)
    # The code itself was read: what version it calls itself no longer matters.
    if probe.status == FAULTY and defect.applies(evidence.facts, versions=False) is True:
        return _finding(defect, Standing.READ, evidence, (f"{probe.where}: {probe.what}",), 0)
    return None


def _explains(defect: Defect, chosen: Selection | None) -> bool:
    if chosen is None or not defect.selector_reason or not chosen.adjustable or chosen.settings.get("use_sparse") == "False":
        return False
    return defect.selector_reason in chosen.blocking


def _standing_of_hit(defect: Defect, hit: Hit, evidence: Evidence) -> Standing | None:
    checked = True if defect.check is None else defect.check.holds(_numbers(hit.fields))
    # What the log says about its own machine decides; this machine need not be the one that wrote it.
    applies = defect.applies(evidence.of_log)
    if applies is None:
        applies = defect.applies(evidence.facts)
    if checked is False or (applies is False and (defect.symptom or defect.applies(evidence.of_log) is False)):
        return None
    if defect.symptom and (applies is None or checked is None):
        return Standing.POSSIBLE
    return Standing.SEEN


def _numbers(fields: Mapping[str, str]) -> dict[str, int]:
    return {name: int(value) for name, value in fields.items() if _WHOLE.fullmatch(value)}


def _log_line(hit: Hit) -> str:
    where = f" [{hit.worker}]" if hit.worker else ""
    times = f" ({hit.count} times)" if hit.count > 1 else ""
    return f"log line {hit.line}{where}{times}: {hit.excerpt}"


def _number_lines(hit: Hit) -> list[str]:
    try:
        needed, current = float(hit.fields["needed"]), float(hit.fields["current"])
    except (KeyError, ValueError):
        return []
    return [f"needs {needed:g} MB, has {current:g} MB: {needed - current:.2f} MB short"]


def _selector_lines(defect: Defect, chosen: Selection | None) -> list[str]:
    if defect.id != "no-sparse-backend" or chosen is None:
        return []
    dense = sum(candidate.dense for candidate in chosen.candidates)
    if not chosen.nearest:
        return [f"{dense} dense backends answered 'sparse not supported' (no fault); the engine tried no sparse one"]
    others = len(chosen.candidates) - dense
    return [f"blocking: {chosen.nearest}: {', '.join(chosen.blocking)}", f"noise: {dense} dense of {dense + others} backends"]


def _possible(defect: Defect, evidence: Evidence) -> Finding | None:
    """Facts alone name an entry only where all of its conditions are known to hold, and it leaves no message behind."""
    if defect.signatures or defect.selector_reason or (defect.probe and not str(defect.versions)):
        return None
    if defect.applies(evidence.facts) is not True:
        return None
    basis = f"versions {defect.versions} ({defect.basis})" if str(defect.versions) else "no version range is known"
    reads = sorted({name for rule in (defect.device, defect.config) if rule for name in rule.names})
    shown = ", ".join(f"{name} = {evidence.facts[name]}" for name in reads if name in evidence.facts)
    return _finding(defect, Standing.POSSIBLE, evidence, (f"{shown or 'any device'}; {basis}",), 0)


def _finding(
    defect: Defect, standing: Standing, evidence: Evidence, lines: tuple[str, ...], line: int
) -> Finding:
    threshold = defect.threshold.value(evidence.facts) if defect.threshold else None
    return Finding(
        defect=defect,
        standing=standing,
        evidence=lines,
        remedies=offered(defect.remedies, evidence),
        threshold=threshold if isinstance(threshold, int) else None,
        line=line,
    )


def offered(remedies: Sequence[Remedy], evidence: Evidence) -> tuple[Remedy, ...]:
    """Remedies whose condition is not known to fail and whose options the installed version has."""
    return tuple(
        remedy
        for remedy in remedies
        if (remedy.when is None or remedy.when.holds(evidence.facts) is not False)
        and (evidence.flags is None or all(flag in evidence.flags for flag in remedy.flags))
    )
