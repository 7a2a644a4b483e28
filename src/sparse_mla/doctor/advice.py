"""From a question to a diagnosis: gather evidence, judge it, say what was checked and found well."""

from __future__ import annotations

import stat
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .. import envs
from ..engine_source import tree as source
from ..engine_source.audit import SOUND, audit
from ..errors import NotCheckableError, UsageError
from . import candidates, child, environment, longprefill, ours
from .facts import (
    Facts,
    device_facts,
    from_config,
    from_environment,
    from_machine,
    from_plugins,
    plugin_mode,
)
from .findings import Evidence, Finding, Standing, judge, offered
from .flags import Options
from .knowledge import load
from .log_facts import LOG_FACTS, from_log
from .logs import scan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ..engine_source.audit import Probe
    from ..engine_source.tree import SourceTree
    from .candidates import Offers
    from .environment import Machine
    from .knowledge import Remedy
    from .logs import LogReport
    from .longprefill import LongPrefill
    from .ours import Ours

HEALTHY, FAULT, UNKNOWN = "healthy", "fault", "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What was asked. ``log`` is a path or ``-`` for standard input; numbers are the engine's launch flags; ``static``:
    never run the engine's code, not even in a child.
    """

    model: str | None = None
    log: str | None = None
    vllm_source: str | None = None
    simulate: str | None = None
    tp: int | None = None
    pp: int | None = None
    dcp: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    prompt_tokens: int | None = None
    static: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """The vLLM plugin of this package as the command line knows it: supported versions, and the check of its seams."""

    supports: str
    mismatches: Callable[[Path], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that is reported. ``findings`` stand in reading order; ``first_error`` is the log's own."""

    verdict: str
    machine: Machine
    packages: dict[str, str]
    facts: Facts
    findings: tuple[Finding, ...]
    well: tuple[str, ...]
    notes: tuple[str, ...]
    source: SourceTree | None
    probes: Mapping[str, Probe]
    offers: Offers | None
    ours: Ours
    chain: LongPrefill | None
    ways_out: tuple[Remedy, ...]
    log: LogReport | None

    @property
    def primary(self) -> Finding | None:
        """The one to act on, if any stands firmly enough."""
        first = self.findings[0] if self.findings else None
        return first if first is not None and _firm(first, self.log) else None


def _firm(finding: Finding, report: LogReport | None) -> bool:
    """Whether a finding is the answer. Where a log shows an error, code that is faulty somewhere does not explain it."""
    if finding.defect.severity in {"note", "slow"} or finding.defect.id == "engine-core-died":
        return False
    unexplained = report is not None and bool(report.first_error)
    return finding.standing is Standing.SEEN or (finding.standing is Standing.READ and not unexplained)


def diagnose(question: Question, plugin: Plugin | None = None) -> Diagnosis:
    """Answer ``question``.

    Raises:
        UsageError, ConfigError: a file or value that was given cannot be used.
        NotCheckableError: the log cannot be read.
    """
    here, packages = environment.machine(), environment.packages()
    tree = source.given(question.vllm_source) if question.vllm_source else source.installed()
    report = _read_log(question.log) if question.log else None
    facts = _facts(question, here, packages, tree, report)
    if _other_engine(facts) and tree is not None:
        facts.notes.append(f"the log is from {facts.values['engine']}: the vLLM here was not looked at")
        tree = None
    probes = audit(tree) if tree is not None else {}
    offers = _offers(tree, facts, question) if tree is not None else None
    evidence = Evidence(
        facts=facts.values,
        of_log=facts.of_log,
        hits=None if report is None else {hit.key: hit for hit in report.hits},
        probes=_probes_for_log(probes, tree, facts) or None,
        flags=Options(tree) if tree is not None else None,
        offered=offers.refusal if offers is not None and facts.values.get("dsa") is not False else None,
        model=question.model or "",
        plugin_range=plugin.supports if plugin else "",
    )
    findings, covered = _split_covered(judge(load(), evidence), facts, question)
    facts.notes += _variable_notes()
    well = [*covered, *_well(findings, probes, facts)]
    notes = [
        *facts.notes,
        *(tree.problems if tree else _no_source(facts)),
    ]
    if tree is not None and plugin is not None:
        _check_seams(tree, plugin, well, notes)
    chain = longprefill.follow(facts.values, probes or None, offers)
    return Diagnosis(
        verdict=_verdict(findings, report),
        machine=here,
        packages=packages,
        facts=facts,
        findings=tuple(findings),
        well=tuple(well),
        notes=tuple(notes),
        source=tree,
        probes=probes,
        offers=offers,
        ours=ours.resolve_all(facts.values, question.model, question.simulate),
        chain=chain,
        ways_out=offered(longprefill.remedies(chain), evidence) if chain else (),
        log=report,
    )


def _verdict(findings: Sequence[Finding], report: LogReport | None) -> str:
    if findings and _firm(findings[0], report):
        return FAULT
    return UNKNOWN if report is not None and shown(findings, report) else HEALTHY


def shown(findings: Sequence[Finding], report: LogReport) -> str:
    """What shows in a log that something failed; "" when nothing does."""
    lines = (item.evidence[0] for item in findings if item.line and item.defect.severity not in {"note", "slow"})
    return report.first_error or next(lines, "")


def _facts(
    question: Question, here: Machine, packages: dict[str, str], tree: SourceTree | None, report: LogReport | None
) -> Facts:
    """Facts by strength: flags, model, log, simulated device, source, shell, this machine."""
    facts = Facts()
    names = (
        "tp",
        "pp",
        "dcp",
        "max_model_len",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "block_size",
        "prompt_tokens",
    )
    facts.add("flag", {name: getattr(question, name) for name in names})
    if question.simulate:
        facts.add("--simulate", device_facts(question.simulate))
    of_report = from_log(report) if report is not None else {}
    if question.model:
        of_report.pop("dsa", None)  # the config says it better
    facts.add("log", of_report)
    if question.model:
        tp, pp = facts.values.get("tp") or 1, facts.values.get("pp") or 1
        values, notes = from_config(question.model, tp=tp, pp=pp)
        facts.add("model", values)
        facts.notes += notes
    elif "dsa" not in facts.values:
        facts.add("assumed", {"dsa": True, "dsa_assumed": True})
    if tree is not None and tree.origin == "given":
        facts.add("source", {"engine": "vllm", "version:vllm": tree.version or None})
        packages = {name: version for name, version in packages.items() if name not in source.DISTRIBUTIONS}
    facts.add("shell", from_environment())
    facts.add(
        "packages", {k: v for k, v in from_machine(here, packages).items() if k.startswith(("version:", "engine"))}
    )
    facts.add("machine", from_machine(here, packages))
    if not question.vllm_source:
        builds = {name: build.version for name, build in source.distributions().items()}
        facts.add("machine", from_plugins(builds, registered=environment.plugin_registered()))
    return facts


def _other_engine(facts: Facts) -> bool:
    """Whether the log says that another engine than vLLM wrote it."""
    return facts.sources.get("engine") == "log" and facts.values["engine"] != "vllm"


def _no_source(facts: Facts) -> list[str]:
    return [] if _other_engine(facts) else ["no vLLM was found: its source and candidates were not checked"]


def _probes_for_log(probes: Mapping[str, Probe], tree: SourceTree | None, facts: Facts) -> Mapping[str, Probe]:
    """The source here says nothing about a log that another version wrote."""
    stated = facts.values.get("version:vllm") if facts.sources.get("version:vllm") == "log" else None
    if tree is not None and stated and tree.version and stated.split("+")[0] != tree.version.split("+")[0]:
        facts.notes.append(
            f"the log is from vLLM {stated}, the source read here is {tree.version}: not used as evidence"
        )
        return {}
    return probes


def _offers(tree: SourceTree, facts: Facts, question: Question) -> Offers | None:
    values = facts.values
    arch = values.get("arch")
    if not arch:
        return None
    model = ours.raw_config(question.model)
    rank, rope = values.get("kv_lora_rank") or 512, values.get("qk_rope_head_dim")
    request = candidates.Request(
        arch=str(arch),
        head_size=rank + (64 if rope is None else rope),
        num_heads=values.get("heads_per_rank"),
        dtype=str(values.get("dtype") or "bfloat16"),
        kv_cache_dtype=str(values.get("kv_cache_dtype") or "auto"),
        block_size=values.get("block_size"),
        dcp=values.get("dcp") or 1,
        model=model,
    )
    read = candidates.read(tree, request)
    run_it = question.simulate is not None and tree.origin == "installed" and not question.static
    return child.ask(request, read) if run_it else read


def _split_covered(findings: list[Finding], facts: Facts, question: Question) -> tuple[list[Finding], list[str]]:
    """Findings, and sentences for those that the installed plugin takes care of by itself."""
    serves = not question.vllm_source and environment.plugin_registered() and plugin_mode() != "off"
    serves = serves and not facts.values.get("plugin_excluded")
    proved = ours.proved(str(facts.values.get("arch"))) or plugin_mode() == "always"
    if not (serves and proved):
        return findings, []
    covered = [item for item in findings if item.defect.covered and item.standing is not Standing.SEEN]
    texts = [f"{item.defect.title}; the installed sparse-mla plugin serves there" for item in covered]
    return [item for item in findings if item not in covered], texts


def _well(findings: Sequence[Finding], probes: Mapping[str, Probe], facts: Facts) -> list[str]:
    """Faults that could concern this device and model, whose code was read and is sound."""
    found = {finding.defect.id for finding in findings}
    return [
        f"not here: {defect.title} ({probes[defect.probe].what})"
        for defect in load()
        if defect.probe in probes
        and probes[defect.probe].status == SOUND
        and defect.id not in found
        and defect.applies(facts.values, versions=False) is not False
    ]


def _variable_notes() -> list[str]:
    """SPARSE_MLA_* variables of this shell that no command would accept."""
    return [note for variable in envs.VARIABLES if (note := _variable_note(variable.name))]


def _variable_note(name: str) -> str:
    try:
        envs.get(name)
    except UsageError as error:
        return str(error)
    return ""


def _check_seams(tree: SourceTree, plugin: Plugin, well: list[str], notes: list[str]) -> None:
    try:
        unmet = list(plugin.mismatches(tree.root))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        unmet = [f"the source cannot be read ({type(error).__name__})"]
    if unmet:
        notes.append(f"the plugin's seams do not fit this vLLM ({len(unmet)}): {'; '.join(unmet[:3])}")
    else:
        well.append("every seam of the sparse-mla plugin fits this vLLM's source")


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    file = Path(path)
    try:
        if stat.S_ISDIR(file.stat().st_mode):
            raise UsageError("--log", needs="a file, or - for standard input", got=f"the folder {path}"[:200])
        with file.open("rb") as opened:
            yield opened
    except (OSError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise NotCheckableError(f"cannot read {path[:200]}", got=getattr(error, "strerror", "") or str(error)) from None


def _read_log(path: str) -> LogReport:
    signatures = {defect.id: defect.signatures for defect in load() if defect.signatures}
    with _opened(path) as stream:
        return scan(stream, signatures, LOG_FACTS)
