"""Entry point of vLLM's general plugins. vLLM calls ``register`` in every process, for every model, before anything else.

So it imports neither torch nor triton and never raises: whatever is wrong is said where a DSA model asks for a backend
that ours would serve, and nobody else ever notices that sparse-mla is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def register() -> None:
    """Hook vLLM's choice of an attention backend, unless ``SPARSE_MLA_VLLM=off``."""
    if os.environ.get("SPARSE_MLA_VLLM") == "off":
        return
    from . import seams

    try:
        seams.hook_backend_choice(_choose)
        seams.hook_engine_config(_serves)
        seams.backend_name()
    except Exception as fault:  # noqa: BLE001 (a plugin must not stop an engine that does not need it)
        seams.logger().warning("sparse-mla cannot serve DSA models here, vLLM changed under its plugin: %r", fault)


def _choose(native: Callable[[], str], asked_for: str | None) -> str:
    from .selection import choose_backend

    return choose_backend(native, asked_for)


def _serves(model_type: str | None, asked_for: str | None) -> bool:
    from .selection import would_serve

    return would_serve(model_type, asked_for)
