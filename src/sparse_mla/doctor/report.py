"""A diagnosis as data for programs, and as titled lines for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .advice import shown
from .findings import Standing
from .longprefill import steps

if TYPE_CHECKING:
    from .advice import Diagnosis
    from .candidates import Offer
    from .findings import Finding
    from .knowledge import Defect, Remedy

SCHEMA = "sparse-mla/doctor/1"
_MAX_POSSIBLE = 6
_TELLING = (
    *("arch", "version:vllm", "model_type", "index_topk", "indexer_layers", "heads_per_rank", "tp", "pp", "dcp"),
    *("kv_cache_dtype", "block_size", "max_num_batched_tokens", "max_model_len", "prompt_tokens"),
)
_UNKNOWN_FIX = "Report the block of `--report`. If the server starts, `sparse-mla verify --endpoint URL` shows whether its answers are right."


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading and its lines; ``tone`` is bad, good or plain."""

    title: str
    lines: tuple[str, ...]
    tone: str = "plain"


def as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    """The JSON object: schema, ok, findings, and everything that led to them."""
    return {
        "schema": SCHEMA,
        "ok": diagnosis.verdict == "healthy",
        "verdict": diagnosis.verdict,
        "findings": [*_unknown_data(diagnosis), *map(_finding_data, diagnosis.findings)],
        "checked_well": list(diagnosis.well),
        "notes": list(diagnosis.notes),
        "machine": asdict(diagnosis.machine),
        "packages": diagnosis.packages,
        "facts": {
            name: {"value": value, "from": diagnosis.facts.sources[name]}
            for name, value in sorted(diagnosis.facts.values.items())
        },
        "source": _source_data(diagnosis),
        "engine_candidates": asdict(diagnosis.offers) if diagnosis.offers else None,
        "sparse_mla": asdict(diagnosis.ours),
        "long_prefill": _chain_data(diagnosis),
    }


def _finding_data(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.defect.id,
        "severity": finding.defect.severity,
        "title": finding.defect.title,
        "standing": finding.standing.name.lower(),
        "evidence": list(finding.evidence),
        "cause": finding.defect.cause,
        "threshold_prompt_tokens": finding.threshold,
        "fix": [_remedy_data(remedy) for remedy in finding.remedies],
        "does_not_help": list(finding.defect.does_not_help),
        "references": list(finding.defect.references),
    }


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    return {"do": remedy.do, "command": remedy.command, "approximate": remedy.approximate}


def _unknown_data(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    if diagnosis.verdict != "unknown" or diagnosis.log is None:
        return []
    return [
        {
            "id": "unknown",
            "severity": "unknown",
            "title": "The log shows an error that the knowledge base does not know",
            "standing": "seen",
            "evidence": [shown(diagnosis.findings, diagnosis.log)],
            "cause": "unknown",
            "threshold_prompt_tokens": None,
            "fix": [{"do": _UNKNOWN_FIX, "command": "", "approximate": False}],
            "does_not_help": [],
            "references": [],
        }
    ]


def _source_data(diagnosis: Diagnosis) -> dict[str, Any] | None:
    if diagnosis.source is None:
        return None
    return {
        "engine": "vllm",
        "version": diagnosis.source.version,
        "origin": diagnosis.source.origin,
        "probes": {name: asdict(probe) for name, probe in diagnosis.probes.items()},
    }


def _chain_data(diagnosis: Diagnosis) -> dict[str, Any] | None:
    if diagnosis.chain is None:
        return None
    return {
        **asdict(diagnosis.chain),
        "wrong": list(diagnosis.chain.wrong),
        "fix": [_remedy_data(item) for item in diagnosis.ways_out],
    }


def commands(diagnosis: Diagnosis) -> list[str]:
    """The primary finding's commands, a comment above each; nothing is run."""
    first = diagnosis.primary
    if first is None:
        return ["# nothing to fix was found"]
    lines = [f"# {first.defect.id}: {first.defect.title}"]
    for remedy in first.remedies:
        label = "APPROXIMATE: " if remedy.approximate else ""
        lines += [f"# {label}{remedy.do}", *([remedy.command] if remedy.command else [])]
    return lines


def sections(diagnosis: Diagnosis) -> list[Section]:
    """What people read, in order: the finding, its cure, the chain, the candidates, the rest."""
    made = [_headline(diagnosis)]
    if diagnosis.chain is not None:
        made.append(_chain(diagnosis))
    if diagnosis.offers is not None:
        made.append(_candidates(diagnosis))
    made.append(_ours(diagnosis))
    secondary = diagnosis.findings[1:] if diagnosis.primary else diagnosis.findings
    made += [
        Section(
            title="Further findings",
            lines=tuple(_short(item) for item in secondary if item.standing is not Standing.POSSIBLE),
        ),
        _possible([item for item in secondary if item.standing is Standing.POSSIBLE]),
        Section(title="Checked and well", lines=diagnosis.well, tone="good"),
        Section(title="Notes", lines=diagnosis.notes),
        _taken(diagnosis),
        Section(title="Here", lines=_here(diagnosis)),
    ]
    return [section for section in made if section.lines]


def _headline(diagnosis: Diagnosis) -> Section:
    first = diagnosis.primary
    if first is not None:
        return Section(
            title=f"{first.defect.severity}: {first.defect.title}  [{first.defect.id}]", lines=_body(first), tone="bad"
        )
    if diagnosis.verdict == "unknown" and diagnosis.log is not None:
        error = shown(diagnosis.findings, diagnosis.log)
        lines = ("Cause: unknown. Nothing in the knowledge base explains it.", error, _UNKNOWN_FIX)
        return Section(title="unknown: the log shows an error", lines=lines, tone="bad")
    read = f"No line of the log ({diagnosis.log.num_lines:,} read) shows an error. " if diagnosis.log else ""
    return Section(title="No fault found", lines=(f"{read}What was checked stands below.",), tone="good")


def _body(finding: Finding) -> tuple[str, ...]:
    defect = finding.defect
    lines = [f"Evidence ({finding.standing}):", *(f"  {line}" for line in finding.evidence)]
    lines += [f"Cause: {defect.cause}", f"Proof: {defect.proof}"]
    if finding.threshold:
        lines.append(f"Shows from {finding.threshold:,} prompt tokens on.")
    lines.append("Cure, in this order:")
    lines += _numbered(list(finding.remedies))
    lines += [f"Does not help: {text}" for text in defect.does_not_help]
    return (*lines, f"References: {', '.join(defect.references)}")


def _numbered(remedies: list[Remedy]) -> list[str]:
    lines: list[str] = []
    for number, remedy in enumerate(remedies, 1):
        lines.append(f"  {number}. {'APPROXIMATE: ' if remedy.approximate else ''}{remedy.do}")
        if remedy.command:
            lines.append(f"       {remedy.command}")
    return lines or ["  none that this version offers"]


def _short(finding: Finding) -> str:
    first = finding.evidence[0] if finding.evidence else ""
    return f"{finding.defect.severity}: {finding.defect.title} [{finding.defect.id}], {finding.standing}: {first}"


def _possible(findings: list[Finding]) -> Section:
    lines = [f"{item.defect.severity}: {item.defect.title} [{item.defect.id}]" for item in findings[:_MAX_POSSIBLE]]
    if len(findings) > _MAX_POSSIBLE:
        lines.append(f"and {len(findings) - _MAX_POSSIBLE} more with --json")
    return Section(
        title="Reported for such settings, not shown to be so here (`sparse-mla explain ID`)", lines=tuple(lines)
    )


def _chain(diagnosis: Diagnosis) -> Section:
    if diagnosis.chain is None:
        return Section(title="", lines=())
    lines = (
        [*steps(diagnosis.chain), *_numbered(list(diagnosis.ways_out))]
        if diagnosis.ways_out
        else steps(diagnosis.chain)
    )
    return Section(title="Long prefill on ROCm", lines=tuple(lines), tone="bad" if diagnosis.chain.wrong else "plain")


def _candidates(diagnosis: Diagnosis) -> Section:
    offers = diagnosis.offers
    if offers is None:
        return Section(title="", lines=())
    dense = [offer.name for offer in offers.backends if offer.dense]
    lines = [f"{offers.how}"]
    lines += [_offer(offer) for offer in offers.backends if not offer.dense]
    if dense:
        lines.append(f"{', '.join(dense)}: dense, never used for this model")
    if offers.indexer is not None:
        lines.append(f"then its {_offer(offers.indexer)}")
    return Section(title=f"The engine's own sparse backends on {offers.arch}", lines=(*lines, *offers.notes))


def _offer(offer: Offer) -> str:
    text = f"{offer.name}: {offer.status}"
    if offer.reasons:
        text += (
            f" ({'; '.join(offer.reasons)})" if offer.status != "depends" else f": refuses ({'; '.join(offer.reasons)})"
        )
    return f"{text} if {' and '.join(offer.conditions)}" if offer.conditions else text


def _ours(diagnosis: Diagnosis) -> Section:
    ours = diagnosis.ours
    lines = [
        f"{choice.stage}: {choice.backend} ({choice.mode})"
        if choice.backend
        else f"{choice.stage}: none ({'; '.join(choice.reasons)})"
        for choice in ours.stages
    ]
    if ours.serves and not ours.proved:
        lines.append("no end-to-end run is on record for this kind of device: SPARSE_MLA_VLLM=always asks for it")
    return Section(title=f"sparse-mla on {ours.arch}", lines=tuple(lines) or (ours.trouble,))


def _taken(diagnosis: Diagnosis) -> Section:
    """What the answer rests on, and who said so."""
    facts = diagnosis.facts
    known = [name for name in _TELLING if name in facts.values]
    return Section(
        title="Judged for", lines=tuple(f"{name}: {facts.values[name]} ({facts.sources[name]})" for name in known)
    )


def _here(diagnosis: Diagnosis) -> tuple[str, ...]:
    machine = diagnosis.machine
    gpus = [f"{gpu.name} ({gpu.arch}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {gpu.driver})" for gpu in machine.gpus]
    cpu = f"{machine.cpu} ({', '.join(machine.cpu_flags) or 'no vector extensions known'}), {machine.memory_bytes / 2**30:.0f} GiB"
    packages = ", ".join(f"{name} {version}" for name, version in diagnosis.packages.items())
    return (
        machine.system,
        cpu,
        *(gpus or ["no GPU answered"]),
        packages or "none of the packages that matter is installed",
    )


def for_pasting(diagnosis: Diagnosis) -> str:
    """A Markdown block with everything that an issue needs."""
    lines = ["### sparse-mla doctor", ""]
    for section in sections(diagnosis):
        lines += [
            f"**{section.title}**",
            "",
            "```text",
            *(line.replace("```", "'''") for line in section.lines),
            "```",
            "",
        ]
    return "\n".join(lines).rstrip()


def explain(defect: Defect) -> list[Section]:
    """One entry of the knowledge base, whole."""
    versions = f"{defect.versions} ({defect.basis})" if str(defect.versions) else "not stated"
    touched = [f"engine: {defect.engine}, versions: {versions}"]
    touched += [f"{name}: {specifier} ({defect.basis})" for name, specifier in defect.packages.items()]
    touched += [f"{name}: {rule.text}" for name, rule in (("device", defect.device), ("config", defect.config)) if rule]
    if defect.threshold:
        touched.append(f"shows from this many prompt tokens on: {defect.threshold.text}")
    if defect.probe:
        touched.append(f"source probe: {defect.probe}")
    if defect.common:
        touched.append(f"its messages are printed by other {defect.common}, too: judged by what else the log shows")
    made = [
        Section(
            title=f"{defect.severity}: {defect.title}  [{defect.id}]",
            lines=(f"Cause: {defect.cause}", f"Proof: {defect.proof}"),
        ),
        Section(title="Touches", lines=tuple(touched)),
        Section(title="Log messages", lines=tuple(item.text for item in defect.signatures)),
        Section(title="Cure, in this order", lines=tuple(_numbered(list(defect.remedies)))),
        Section(title="Does not help", lines=defect.does_not_help),
        Section(title="References", lines=defect.references),
    ]
    return [section for section in made if section.lines]


def explain_data(defect: Defect) -> dict[str, Any]:
    """One entry as JSON."""
    return {
        "schema": "sparse-mla/explain/1",
        "ok": True,
        "findings": [],
        "defect": {
            "id": defect.id,
            "group": defect.group,
            "severity": defect.severity,
            "title": defect.title,
            "engine": defect.engine,
            "versions": str(defect.versions),
            "packages": {name: str(specifier) for name, specifier in defect.packages.items()},
            "basis": defect.basis,
            "device": defect.device.text if defect.device else "",
            "config": defect.config.text if defect.config else "",
            "signatures": [item.text for item in defect.signatures],
            "common": defect.common,
            "probe": defect.probe,
            "threshold": defect.threshold.text if defect.threshold else "",
            "cause": defect.cause,
            "proof": defect.proof,
            "fix": [_remedy_data(remedy) for remedy in defect.remedies],
            "does_not_help": list(defect.does_not_help),
            "references": list(defect.references),
        },
    }
