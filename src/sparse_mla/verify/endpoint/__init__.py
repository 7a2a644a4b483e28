"""`sparse-mla verify --endpoint`: black box, any OpenAI-compatible server, standard library HTTP.

``add_arguments``, ``refuse_alone`` and ``run`` are all that the command line calls. See docs/verify-endpoint.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .options import add_arguments, refuse_alone

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "refuse_alone", "run"]


def run(args: argparse.Namespace) -> int:
    """Exit code 0 verified, 1 a fault found, 2 wrong usage, 3 could not be checked."""
    from .target import run_target  # TLS and HTTP are loaded by this target alone

    return run_target(args)
