"""What several commands ask of their environment and options."""

from __future__ import annotations

import re
from importlib.util import find_spec

from ..errors import NotCheckableError, UsageError


def require_torch() -> None:
    """Refuse, with the one command that brings it, where torch is not installed.

    Raises:
        NotCheckableError: torch cannot be found.
    """
    if find_spec("torch") is None:
        raise NotCheckableError("torch is not installed", hint='Run: pip install "sparse-mla[torch]"')


def require_device(text: str) -> None:
    """Refuse a ``--device`` that is no device name.

    Raises:
        UsageError: neither cpu nor cuda nor cuda:N.
    """
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise UsageError("--device", needs="cpu, cuda or cuda:N", got=repr(text))
