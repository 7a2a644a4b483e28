"""Every SPARSE_MLA_* variable: name, parser, default and documentation line. A bad value raises."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError("|".join(allowed))
        return text

    return parse


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("0|1")
    return text == "1"


def _mebibytes(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise ValueError("a whole number of MiB from 1 to 1048576")
    return int(text) << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One environment variable. ``parse`` raises ValueError with a description of what is allowed."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="SPARSE_MLA_VLLM",
        parse=_choice("off", "fallback", "always"),
        default="fallback",
        doc="off: the vLLM plugin does nothing. fallback: chosen where vLLM itself has no valid sparse backend. "
        "always: chosen for every sparse-MLA model.",
    ),
    Variable(
        name="SPARSE_MLA_BACKEND",
        parse=str,
        default="auto",
        doc="The backend for every stage, by name; auto walks the table. An explicit name never falls back.",
    ),
    Variable(
        name="SPARSE_MLA_DETERMINISTIC",
        parse=_flag,
        default=False,
        doc="1: strict mode: one reduction order for prefill and decode on every backend (always so on eager).",
    ),
    Variable(
        name="SPARSE_MLA_SCRATCH_MIB",
        parse=_mebibytes,
        default=256 << 20,
        doc="Scratch of one stage in MiB, where the stage has a choice (rows of a chunk). What it cannot do without comes "
        "on top where it must: `sparse-mla plan` states the sum.",
    ),
    Variable(
        name="SPARSE_MLA_INDEX_KEYS",
        parse=_choice("fp8", "plain"),
        default="fp8",
        doc="How the vLLM plugin caches index keys. fp8: vLLM's own rows of fp8 values and a scale. plain: the "
        "activations' dtype, without quantisation of keys or index queries.",
    ),
    Variable(
        name="SPARSE_MLA_TRACE",
        parse=str,
        default="",
        doc="A folder: the vLLM plugin writes SHA-256 hashes of cache rows, selected indices and outputs there.",
    ),
    Variable(
        name="SPARSE_MLA_CACHE_DIR",
        parse=str,
        default="",
        doc="Folder for the models that verify makes (tiny, retrieval); empty: sparse-mla below the user's cache folder.",
    ),
)
_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str) -> Any:
    """Value of the variable ``name``, parsed now (never cached: tests and engines change the environment).

    Raises:
        UsageError: the value is not one that the variable's parser allows.
    """
    variable = _BY_NAME[name]
    text = os.environ.get(name)
    if text is None or text == "":
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise UsageError(
            f"environment variable {name}", needs=str(error), got=repr(text), hint=f"Unset it for {variable.default!r}."
        ) from None
