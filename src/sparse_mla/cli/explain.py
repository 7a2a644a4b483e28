"""``sparse-mla explain ID``: one entry of doctor's knowledge base; without an id, all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..doctor import report
from ..doctor.knowledge import find, load
from .doctor import draw
from .render import console, emit_json

if TYPE_CHECKING:
    import argparse

SUMMARY = "explain a defect by its id: cause, proof, cure, references; without an id list all"


def configure(parser: argparse.ArgumentParser) -> None:
    """One optional id."""
    parser.add_argument("id", nargs="?", help="id of a finding, e.g. plan-cached-under-small-key")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; an unknown id raises a UsageError that names the nearest ones."""
    if args.id is None:
        return _list(args.format)
    defect = find(args.id)
    if args.format == "json":
        emit_json(report.explain_data(defect))
    elif args.format == "human":
        draw(report.explain(defect), console())
    return 0


def _list(form: str) -> int:
    defects = load()
    if form == "json":
        entries = [
            {"id": item.id, "group": item.group, "severity": item.severity, "title": item.title} for item in defects
        ]
        emit_json({"schema": "sparse-mla/explain/1", "ok": True, "findings": [], "defects": entries})
    elif form == "human":
        lines = tuple(f"{item.id:<42} {item.severity:<13} {item.title}" for item in defects)
        draw([report.Section(title=f"{len(lines)} known defects", lines=lines)], console())
    return 0
