"""What a run of verify says: checks and findings, what was proved and what not. As JSON, JUnit XML or text."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = "sparse-mla/verify/1"
_REPORT = "Report it with this JSON: the evidence names the first wrong row."
_FIXES = {
    "write": f"Compare row layout and write rule with docs/cache-formats.md. {_REPORT}",
    "select": f"Wrong tokens are selected: do not serve with this backend, ask for another with --backend. {_REPORT}",
    "attend": f"Outputs are wrong: do not serve with this backend, ask for another with --backend. {_REPORT}",
    "facts": "Read facts.verdicts; run `sparse-mla doctor` on the server's log, and report it with --report FILE.",
    "recall": f"Facts are lost through sparse attention: the first check that fails names the stage. {_REPORT}",
    "control": "The comparison would not notice wrong selections on this model: use longer prompts or another model.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        id: stable name, ``target.stage.comparison``.
        case: what it was made on, e.g. ``20,000 tokens, normal``.
        what: what was compared, for people.
        detail: where it failed and how; empty when ``ok``.
        seconds: time it took, as far as it was measured alone.
    """

    id: str
    case: str
    what: str
    ok: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of one target. ``facts`` and ``cases`` hold JSON values only.

    Attributes:
        proved, not_proved: what the checks that passed amount to, and what they leave open, in words.
        not_checked: targets that did not run, and why.
        unanswered, skipped: checks that could not be made, and those that need not be; ``detail`` says why. JUnit alone
            shows them, so that a run that was cut short is not green.
    """

    target: str
    facts: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]
    checks: tuple[Check, ...]
    proved: tuple[str, ...]
    not_proved: tuple[str, ...]
    seconds: float
    not_checked: tuple[str, ...] = ()
    unanswered: tuple[Check, ...] = ()
    skipped: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """What the command line returns: 0 or 1."""
        return 0 if self.ok else 1

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; ``schema`` changes whenever a key changes its meaning."""
        findings = [
            {
                "id": check.id,
                "severity": "fault",
                "evidence": f"{check.case}: {check.what}: {check.detail}",
                "fix": _FIXES.get(check.id.split(".")[1], _REPORT),
            }
            for check in self.checks
            if not check.ok
        ]
        return {
            "schema": SCHEMA,
            "version": __version__,
            "target": self.target,
            "ok": self.ok,
            "findings": findings,
            "facts": dict(self.facts),
            "cases": [dict(case) for case in self.cases],
            "checks": [
                {"id": check.id, "case": check.case, "what": check.what, "ok": check.ok, "detail": check.detail}
                for check in self.checks
            ],
            "proved": list(self.proved),
            "not_proved": list(self.not_proved),
            "not_checked": list(self.not_checked),
            "seconds": round(self.seconds, 1),
        }

    def to_junit(self) -> bytes:
        """JUnit XML: a test case for each check, made or not."""
        results = [(check, "" if check.ok else "failure") for check in self.checks]
        results += [(check, "error") for check in self.unanswered] + [(check, "skipped") for check in self.skipped]
        kinds = [kind for _, kind in results]
        counts = {
            "tests": str(len(results)),
            "failures": str(kinds.count("failure")),
            "errors": str(kinds.count("error")),
            "skipped": str(kinds.count("skipped")),
        }
        root = ET.Element("testsuites", counts)
        suite = ET.SubElement(
            root, "testsuite", {"name": f"sparse-mla verify {self.target}", "time": f"{self.seconds:.1f}", **counts}
        )
        for check, kind in results:
            name = f"{check.case}: {check.what}"
            case = ET.SubElement(
                suite, "testcase", {"classname": check.id, "name": name, "time": f"{check.seconds:.3f}"}
            )
            if kind:
                ET.SubElement(case, kind, {"message": check.detail}).text = check.detail
        ET.indent(root)
        return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def writable(path: Path, option: str = "--junit") -> Path:
    """Check, before a long run, that a result can be written to ``path`` when it ends.

    Raises:
        UsageError: its folder is missing or not writable, or it is a folder itself.
    """
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(option, needs="a file name in a folder that can be written to", got=str(path))
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step: another reader sees all of it or nothing."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
