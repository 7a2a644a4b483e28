"""``sparse-mla doctor``: the one cause and the cure, from the machine, the model, a log and the engine's own source."""

from __future__ import annotations

import argparse
import sys
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.text import Text

from ..device import KNOWN
from ..doctor import report
from ..doctor.advice import FAULT, UNKNOWN, Plugin, Question, diagnose
from .render import console, emit_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

SUMMARY = "name the one cause and its cure, from the machine, the model's config, a log and the engine's own source"

_MAX_LEN = 1 << 30
_TONES = {"bad": "bold red", "good": "bold green", "plain": "bold"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags are named as vLLM names them."""
    parser.add_argument("--model", metavar="DIR", help="model folder or config.json")
    parser.add_argument("--log", metavar="FILE", help="server log, or - for standard input")
    parser.add_argument("--vllm-source", metavar="DIR", help="audit this vLLM instead of the installed one")
    parser.add_argument("--simulate", choices=KNOWN, metavar="ARCH", help=f"answer for a device: {' '.join(KNOWN)}")
    parser.add_argument("--static", action="store_true", help="with --simulate: read the engine's code, never run it")
    parser.add_argument("--tp", type=_count(4096), help="tensor parallel size")
    parser.add_argument("--pp", type=_count(4096), help="pipeline parallel size")
    parser.add_argument("--dcp", type=_count(4096), help="decode context parallel size")
    parser.add_argument("--max-model-len", type=_count(_MAX_LEN))
    parser.add_argument("--max-num-batched-tokens", type=_count(_MAX_LEN))
    parser.add_argument("--prompt-tokens", type=_count(_MAX_LEN), help="length of a prompt that went wrong")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--block-size", type=_count(65536))
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--report", action="store_true", help="print a block to paste into an issue")
    form.add_argument("--fix", action="store_true", help="print the commands of the cure only; runs nothing")


def _count(most: int) -> type[int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 12 or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"needs a whole number from 1 to {most}, got {text[:40]!r}")
        return int(text)

    return parse  # type: ignore[return-value]  # argparse takes any callable


def run(args: argparse.Namespace) -> int:
    """Exit codes: 0 nothing found, 1 a fault found or an error of unknown cause in the log."""
    if args.log == "-" and sys.stdin.isatty():
        print("reading a log from the terminal; end it with Ctrl-D", file=sys.stderr)
    names = [
        "model",
        "log",
        "vllm_source",
        "simulate",
        "tp",
        "pp",
        "dcp",
        "max_model_len",
        "max_num_batched_tokens",
        "prompt_tokens",
        "kv_cache_dtype",
        "block_size",
    ]
    question = Question(static=args.static, **{name: getattr(args, name) for name in names})
    diagnosis = diagnose(question, _plugin())
    if args.format == "json":
        emit_json(report.as_data(diagnosis))
    elif args.format == "human":
        if args.fix:
            print("\n".join(report.commands(diagnosis)))
        elif args.report:
            print(report.for_pasting(diagnosis))
        else:
            draw(report.sections(diagnosis), console())
    return 1 if diagnosis.verdict in {FAULT, UNKNOWN} else 0


def draw(sections: Sequence[report.Section], where: Console) -> None:
    """Titles in bold, lines as they are: never read as markup."""
    for section in sections:
        where.print(Text(section.title, style=_TONES[section.tone]))
        for line in section.lines:
            where.print(Text(f"  {line}"))
        where.print()


def _plugin() -> Plugin:
    """The vLLM plugin's own demands on an engine's source."""
    from ..integrations.vllm import layer_seams, seams  # noqa: F401  # importing them fills the table of seams

    return Plugin(supports=seams.SUPPORTED, mismatches=_unmet)


@lru_cache(maxsize=2)
def _unmet(root: Path) -> tuple[str, ...]:
    from ..integrations.vllm.contract import mismatches

    return tuple(str(item) for item in mismatches(root))
