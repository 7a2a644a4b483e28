"""Results for people or for programs: results go to stdout, progress and logs to stderr."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_PIPE_COLUMNS = 200


def console(*, error: bool = False) -> Console:
    """A rich console; NO_COLOR and COLUMNS are rich's own business. A pipe is wide: nothing in it needs to be cut."""
    terminal = (sys.stderr if error else sys.stdout).isatty()
    width = None if terminal or "COLUMNS" in os.environ else _PIPE_COLUMNS
    return Console(stderr=error, highlight=False, soft_wrap=not terminal, width=width)


def emit_json(result: Mapping[str, Any]) -> None:
    """One JSON object with a ``schema`` key on stdout."""
    json.dump(result, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A plain table; cells are shown as text, never as markup."""
    from rich.text import Text

    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        drawn.add_column(column)
    for row in rows:
        drawn.add_row(*(Text(str(cell)) for cell in row))
    return drawn


def human_bytes(count: int) -> str:
    """1536 -> ``1.5 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
