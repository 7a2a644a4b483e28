"""``sparse-mla``: parse, dispatch, and turn errors made for users into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import SparseMLAError

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS = ("verify", "doctor", "bench", "plan", "explain")
_INTERRUPTED = 128 + signal.SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sparse-mla",
        description="Sparse MLA on every device, and proof that it is right.",
        epilog="Exit codes: 0 healthy or verified, 1 a fault found, 2 wrong usage, 3 could not be checked.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sparse-mla {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="|".join(_present()))
    for name in _present():
        module = import_module(f"sparse_mla.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False)
        _add_format(command)
        module.configure(command)
        command.set_defaults(run=module.run)
    return parser


def _present() -> list[str]:
    return [name for name in COMMANDS if find_spec(f"sparse_mla.cli.{name}")]


def _add_format(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--format", choices=("human", "json", "quiet"), default="human", help="form of the result")
    group.add_argument("--json", dest="format", action="store_const", const="json", help="same as --format json")
    group.add_argument("-q", "--quiet", dest="format", action="store_const", const="quiet", help="exit code only")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; argparse itself exits with 2 on wrong usage."""
    args = _parser().parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except SparseMLAError as error:
        print(f"sparse-mla {args.command}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"sparse-mla {args.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has gone, as in `| head`: nothing left to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
