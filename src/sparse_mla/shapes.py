"""Binds "[T, H, D_c + D_r] bf16" specs to tensors: the one source of shape and dtype errors.

A spec is a bracketed list of sizes (a whole number, a letter bound by an earlier tensor or by the caller, or a sum of
those) followed by the allowed dtypes, separated by "|"; "any" allows every dtype. Works on anything with ``shape`` and
``dtype``; torch is not imported.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "fp8": "float8_e4m3fn",
    "fp8fnuz": "float8_e4m3fnuz",
}
"""Short dtype names of the docs and their torch names."""
_SHORT = {long: short for short, long in DTYPE_NAMES.items()}
_SPEC = re.compile(r"\[([^\]]*)\]\s*(\S+)")


def dtype_name(dtype: Any) -> str:
    """Short name of a torch dtype (``torch.bfloat16`` -> ``bf16``); an unknown one keeps its own name."""
    long = str(dtype).removeprefix("torch.")
    return _SHORT.get(long, long)


@lru_cache(maxsize=256)
def _parse(spec: str) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    match = _SPEC.fullmatch(spec.strip())
    if match is None:
        raise ValueError(f"shape spec {spec!r} is not of the form '[T, H] bf16|f32'")
    sizes = tuple(tuple(term.strip() for term in size.split("+")) for size in match[1].split(",") if size.strip())
    return sizes, frozenset(match[2].split("|"))


def bind(sizes: dict[str, int], **tensors: tuple[Any, str]) -> None:
    """Check each ``name=(tensor, spec)`` in order; letters not yet in ``sizes`` are bound to what the tensor has.

    Raises:
        ShapeError: rank, a size or the dtype differs; the message names the tensor, the spec and what it got.
    """
    for name, (tensor, spec) in tensors.items():
        dims, dtypes = _parse(spec)
        shape = tuple(tensor.shape)
        got = f"[{', '.join(map(str, shape))}] {dtype_name(tensor.dtype)}"
        if len(shape) != len(dims):
            raise ShapeError(f"{name} has the wrong rank", needs=spec, got=got)
        for size, terms in zip(shape, dims, strict=True):
            _bind_size(sizes, name, spec, got, size, terms)
        if "any" not in dtypes and dtype_name(tensor.dtype) not in dtypes:
            raise ShapeError(f"{name} has the wrong dtype", needs=spec, got=got)


def _bind_size(sizes: dict[str, int], name: str, spec: str, got: str, size: int, terms: tuple[str, ...]) -> None:
    unbound = [term for term in terms if not term.isdecimal() and term not in sizes]
    known = sum(int(term) if term.isdecimal() else sizes.get(term, 0) for term in terms)
    if len(unbound) == 1 and size >= known:
        sizes[unbound[0]] = size - known
    elif unbound or size != known:
        where = _known(sizes, terms)
        raise ShapeError(f"{name} has the wrong shape", needs=f"{spec}{where}", got=got)


def _known(sizes: Mapping[str, int], terms: tuple[str, ...]) -> str:
    facts = [f"{term} = {sizes[term]}" for term in terms if term in sizes]
    return f" with {', '.join(facts)}" if facts else ""
