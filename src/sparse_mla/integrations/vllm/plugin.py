"""Entry point of vLLM's general plugins. vLLM calls ``register`` in every process, for every model, before anything else.

So it imports neither torch nor triton and never raises: whatever is wrong is said where a DSA model asks for a backend
that ours would serve, and nobody else ever notices that sparse-mla is installed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ... import envs
from ...dims import MODEL_TYPES
from . import seams

if TYPE_CHECKING:
    from collections.abc import Callable

MODE = "SPARSE_MLA_VLLM"


def register() -> None:
    """Hook vLLM's choice of an attention backend, unless ``SPARSE_MLA_VLLM=off``."""
    if os.environ.get(MODE) == "off":
        return
    try:
        seams.hook_backend_choice(choose)
        seams.hook_engine_config(would_serve)
        seams.backend_name()
    except Exception as fault:  # noqa: BLE001 (a plugin must not stop an engine that does not need it)
        seams.logger().warning("sparse-mla cannot serve DSA models here, vLLM changed under its plugin: %r", fault)


def would_serve(model_type: str | None, asked_for: str | None) -> bool:
    """Whether ours is going to be asked for a model: it is DSA, and no other backend was asked for.

    Raises:
        UsageError: the model is DSA and SPARSE_MLA_VLLM has a bad value.
    """
    if model_type not in MODEL_TYPES or asked_for not in (None, seams.BACKEND_NAME):
        return False
    return bool(envs.get(MODE) != "off")


def choose(native: Callable[[], str], asked_for: str | None) -> str:
    """Class path of the backend for sparse MLA layers; what decides is imported only where ours may serve."""
    if not would_serve(seams.current_model_type(), asked_for):
        return native()
    from .selection import choose_backend

    return choose_backend(native, asked_for)
