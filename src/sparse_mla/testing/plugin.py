"""pytest options of the conformance suite.

Registered as a pytest plugin by the package, so that ``pytest --pyargs sparse_mla.testing --backend package:object``
works anywhere; it adds nothing unless the suite is asked for. Imports neither torch nor the suite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .geometries import CI, TAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

SUITE = "sparse_mla.testing"
_GROUP = "sparse-mla conformance"


def add_options(parser: pytest.Parser) -> None:
    """Add the suite's options, once."""
    group = parser.getgroup(_GROUP)
    if group.options:
        return
    group.addoption(
        "--backend",
        action="append",
        metavar="NAME|PACKAGE:OBJECT",
        help="who is judged: a name in the table, or a Row (or a sequence of rows) from outside; may be repeated. "
        "Default: every row of the table that can run on the device.",
    )
    group.addoption("--device", default="cpu", help="torch device that it runs on (default: cpu)")
    group.addoption(
        "--tag", action="append", choices=TAGS, help=f"which cases; may be repeated (default: {CI})", dest="tags"
    )
    group.addoption(
        "--fuzz-examples",
        type=int,
        help="scheduler scripts for each geometry, drawn anew (default: a few, always equal)",
    )


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: Sequence[str]) -> None:
    """Offer the options where the command line names the suite."""
    del early_config
    if any(argument.startswith(SUITE) for argument in args):
        add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a backend that leads nowhere before anything is collected."""
    if config.getoption("backend", None):
        from .conformance.parameters import candidates

        candidates(config)
