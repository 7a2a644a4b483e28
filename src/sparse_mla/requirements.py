"""What a backend can do, declared as data, and the pure check of a problem against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .cache import CacheFormat
    from .device import Device
    from .problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a backend cannot: ``what`` needs ``needs`` and got ``got``; ``hint`` says what would change it."""

    what: str
    needs: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.what}  needs {self.needs}, got {self.got}"
        return f"{text}. {self.hint}" if self.hint else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Requires:
    """Declared limits; an empty tuple or None means no limit.

    Attributes:
        archs: architectures by name, or a device kind (``cpu``, ``cuda``, ``rocm``) for all of it.
        latent, index: cache formats by name and encoding, e.g. ``plain:bf16``, ``fp8_ds_mla:fp8``.
        packages: importable packages that the backend needs.
    """

    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()
    index: tuple[str, ...] = ()
    kv_lora_ranks: tuple[int, ...] = ()
    rope_dims: tuple[int, ...] = ()
    index_head_dims: tuple[int, ...] = ()
    max_heads: int | None = None
    max_index_heads: int | None = None
    max_index_topk: int | None = None
    packages: tuple[str, ...] = ()


def check(requires: Requires, problem: Problem, device: Device, installed: frozenset[str]) -> tuple[Reason, ...]:
    """All reasons why ``problem`` on ``device`` is outside ``requires``; empty means it can run.

    Args:
        installed: names of ``requires.packages`` that can be imported here (offline questions assume all).
    """
    dims = problem.dims
    reasons = [
        _one_of("device", (device.arch, device.kind), requires.archs, device.arch),
        _one_of("dtype", (problem.dtype,), requires.dtypes, problem.dtype),
        _one_of("latent cache", _names(problem.latent), requires.latent, _names(problem.latent)[0]),
        _one_of("index cache", _names(problem.index), requires.index, _names(problem.index)[0]),
        _one_of("kv_lora_rank", (dims.kv_lora_rank,), requires.kv_lora_ranks, dims.kv_lora_rank),
        _one_of("qk_rope_head_dim", (dims.qk_rope_head_dim,), requires.rope_dims, dims.qk_rope_head_dim),
        _one_of("index_head_dim", (dims.index_head_dim,), requires.index_head_dims, dims.index_head_dim),
        _at_most("attention heads per rank", dims.num_heads, requires.max_heads),
        _at_most("index_n_heads", dims.index_n_heads, requires.max_index_heads),
        _at_most("index_topk", dims.index_topk, requires.max_index_topk),
        *(
            Reason(what="package", needs=package, got="not installed", hint=f"pip install {package}")
            for package in requires.packages
            if package not in installed
        ),
    ]
    return tuple(reason for reason in reasons if reason is not None)


def _names(cache_format: CacheFormat) -> tuple[str, str]:
    return f"{cache_format.name}:{cache_format.encoding}", cache_format.name


def _one_of(what: str, values: tuple[object, ...], allowed: tuple[object, ...], got: object) -> Reason | None:
    if not allowed or any(value in allowed for value in values):
        return None
    return Reason(what=what, needs=" or ".join(map(str, allowed)), got=str(got))


def _at_most(what: str, value: int, limit: int | None) -> Reason | None:
    return None if limit is None or value <= limit else Reason(what=what, needs=f"<= {limit}", got=str(value))
