"""Options of ``sparse-mla verify --endpoint``."""

from __future__ import annotations

import argparse
import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..report import writable

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_LENGTHS = (20_000, 40_000, 60_000, 80_000, 100_000)
DEFAULT_INDEX_TOPK = 2048
DEFAULT_CONCURRENCY = 4
_FROM_SAVED = ("index_topk", "chunk_tokens", "concurrency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Checked options. What is not in ``given`` yields to a saved run; ``lengths`` and ``seed`` may be left to it.

    ``keys`` and ``chunk_tokens`` have one entry for each endpoint.
    """

    endpoints: tuple[str, ...]
    model: str | None
    keys: tuple[str, ...]
    ca_file: str | None
    proxy: str | None
    api: str
    style: str | None
    lengths: tuple[int, ...] | None
    index_topk: int
    chunk_tokens: tuple[int | None, ...]
    concurrency: int
    min_recall: float
    answer_tokens: int
    thinking_tokens: int
    timeout: float
    retries: int
    budget_tokens: int | None
    resolution: int
    seed: int | None
    save: Path | None
    resume: bool
    against: Path | None
    report: Path | None
    with_text: bool
    plot: Path | None
    junit: Path | None
    dry_run: bool
    format: str
    given: frozenset[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the endpoint's own options to the parser of ``verify``; ``--endpoint`` chooses the target.

    It shares ``--model``, ``--lengths``, ``--chunk-tokens``, ``--seed``, ``--junit`` and ``--format`` with the others.
    """
    _add_server(parser.add_argument_group("endpoint: which server"))
    _add_checks(parser.add_argument_group("endpoint: what is checked"))
    _add_files(parser.add_argument_group("endpoint: files"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--endpoint", action="append", metavar="URL", default=[],
        help="an OpenAI-compatible server, with or without /v1; a second one of another chunk size helps to localise",
    )  # fmt: skip
    group.add_argument(
        "--api-key-env", action="append", metavar="VAR", default=[],
        help="environment variable that holds the key; given twice, the second is for the second endpoint",
    )  # fmt: skip
    group.add_argument("--ca-file", metavar="PEM", help="certificates to trust instead of the system's")
    group.add_argument("--proxy", metavar="URL", help="http proxy; none connects directly; default: the environment's")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for one request (600)")
    group.add_argument("--retries", type=int, default=2, metavar="N", help="after 429, 5xx or a cut connection (2)")


def _add_checks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api", choices=("auto", "completions", "chat"), default="auto", help="auto takes what answers")
    group.add_argument("--index-topk", type=int, metavar="K", help="the model's index_topk (2048)")
    group.add_argument("--concurrency", type=int, metavar="N", help="requests beside the one judged (4)")
    group.add_argument("--min-recall", type=float, default=1.0, metavar="R", help="for models that are weak themselves")
    group.add_argument("--answer-tokens", type=int, default=400, metavar="N", help="allowance for an answer (400)")
    group.add_argument("--thinking-tokens", type=int, default=8192, metavar="N", help="more, if it must think (8192)")
    group.add_argument("--budget-tokens", type=int, metavar="N", help="bound on all tokens, prompts and answers")
    group.add_argument("--resolution", type=int, default=64, metavar="N", help="tokens to bisect a failure to (64)")
    group.add_argument("--style", metavar="FILE", help="JSON: another wording, or words of the model's vocabulary")
    group.add_argument("--dry-run", action="store_true", help="show what would be sent and what it costs, then stop")


def _add_files(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--save", metavar="FILE", help="keep the run, after every answer")
    group.add_argument("--resume", action="store_true", help="go on with the run in the --save file")
    group.add_argument("--against", metavar="FILE", help="same prompts as a saved run, and compare the answers")
    group.add_argument("--report", metavar="FILE", help="Markdown for a bug report: no key, no URL, no text")
    group.add_argument("--with-text", action="store_true", help="put the answers' text into the report")
    group.add_argument("--plot", metavar="FILE.svg", help="recall by length and depth, and answers grouped by hash")


def parse(args: argparse.Namespace) -> Options:
    """Check everything before a single token is spent.

    Raises:
        UsageError: a value cannot be used.
    """
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and not value >= least:  # also refuses a NaN
            raise UsageError(f"--{name.replace('_', '-')}", needs=f"at least {least}", got=value)
    if not args.min_recall <= 1:
        raise UsageError("--min-recall", needs="a share from 0.1 to 1", got=args.min_recall)
    if args.timeout > 86_400:
        raise UsageError("--timeout", needs="at most 86400 seconds", got=args.timeout)
    if not 1 <= len(args.endpoint) <= 2:
        raise UsageError("--endpoint", needs="one URL, or two", got=len(args.endpoint))
    save = _file("--save", args.save)
    if args.resume and (save is None or not save.exists()):
        raise UsageError("--resume", needs="--save FILE of an earlier run", got="none")
    if save and save.exists() and not args.resume:
        raise UsageError("--save", needs="a new file, or --resume", got=f"{save} exists")
    plot = _file("--plot", args.plot)
    if plot and plot.suffix != ".svg":
        raise UsageError("--plot", needs="a file name ending in .svg", got=plot.name)
    return Options(
        endpoints=tuple(args.endpoint),
        model=args.model,
        keys=_keys(args.api_key_env, len(args.endpoint)),
        ca_file=args.ca_file,
        proxy=args.proxy,
        api=args.api,
        style=args.style,
        lengths=_numbers("--lengths", args.lengths, most=64) if args.lengths else None,
        index_topk=args.index_topk or DEFAULT_INDEX_TOPK,
        chunk_tokens=_chunks(args.chunk_tokens, len(args.endpoint)),
        concurrency=DEFAULT_CONCURRENCY if args.concurrency is None else args.concurrency,
        min_recall=args.min_recall,
        answer_tokens=args.answer_tokens,
        thinking_tokens=args.thinking_tokens,
        timeout=args.timeout,
        retries=args.retries,
        budget_tokens=args.budget_tokens,
        resolution=args.resolution,
        seed=args.seed,
        save=save,
        resume=args.resume,
        against=Path(args.against) if args.against else None,
        report=_file("--report", args.report),
        with_text=args.with_text,
        plot=plot,
        junit=_file("--junit", args.junit),
        dry_run=args.dry_run,
        format=args.format,
        given=frozenset(name for name in _FROM_SAVED if getattr(args, name) is not None),
    )


def refuse_alone(args: argparse.Namespace) -> None:
    """Without ``--endpoint`` none of its options means anything.

    Raises:
        UsageError: one was given.
    """
    own = argparse.ArgumentParser(add_help=False)
    add_arguments(own)
    for name, default in vars(own.parse_args([])).items():
        if getattr(args, name) != default:
            raise UsageError(f"--{name.replace('_', '-')}", needs="--endpoint URL beside it", got="none")


_LEAST = {
    "timeout": 0.1,
    "retries": 0,
    "index_topk": 1,
    "concurrency": 0,
    "min_recall": 0.1,
    "answer_tokens": 1,
    "thinking_tokens": 1,
    "budget_tokens": 1,
    "resolution": 1,
}


def new_seed() -> int:
    """A seed that no cache has seen."""
    return secrets.randbits(48)


def _file(option: str, name: str | Path | None) -> Path | None:
    return writable(Path(name), option) if name else None


def as_saved(options: Options, saved: Mapping[str, Any]) -> Options:
    """The options with what was not given taken from the settings of a saved run."""
    taken = {name: saved[name] for name in _FROM_SAVED if name not in options.given}
    if "chunk_tokens" in taken:
        taken["chunk_tokens"] = (taken["chunk_tokens"], *options.chunk_tokens[1:])
    return replace(options, **taken)


def _keys(variables: list[str], endpoints: int) -> tuple[str, ...]:
    """A key goes to its own endpoint alone."""
    if len(variables) > endpoints:
        raise UsageError("--api-key-env", needs="at most one for each --endpoint", got=len(variables))
    return (*map(_key, variables), *("" for _ in range(endpoints - len(variables))))


def _key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(f"--api-key-env {variable}", needs="a variable that holds the key", got="unset or empty")
    return key


def _numbers(option: str, text: str, *, most: int) -> tuple[int, ...]:
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if (
        not all(part.isascii() and part.isdecimal() and 0 < int(part[:12]) < 1 << 32 for part in parts)
        or len(parts) > most
    ):
        raise UsageError(option, needs=f"1 to {most} positive whole numbers with commas between", got=repr(text))
    return tuple(int(part) for part in parts)


def _chunks(text: str | None, endpoints: int) -> tuple[int | None, ...]:
    given = _numbers("--chunk-tokens", text, most=endpoints) if text else ()
    return (*given, *(None for _ in range(endpoints - len(given))))
