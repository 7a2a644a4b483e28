"""Problem: everything that is fixed for an engine's life, and so the input of every decision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .cache import CacheFormat
    from .dims import MLADims


class Stage(str, Enum):
    """The verbs that a backend can serve."""

    WRITE = "write"
    SELECT = "select"
    ATTEND = "attend"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One rank of one model in one engine.

    Attributes:
        dtype: short name of the activations' dtype (``bf16``, ``f16``, ``f32``): queries, latents, outputs.
        latent: format of the latent cache.
        index: format of the index-key cache.
        latent_block_size, index_block_size: rows of a block of each cache.
        max_num_tokens: query tokens of the largest call.
        max_num_requests: requests of the largest call.
        max_model_len: tokens of the longest request.
        deterministic: ask for strict mode: prefill and decode reduce in one order.
    """

    dims: MLADims
    dtype: str
    latent: CacheFormat
    index: CacheFormat
    latent_block_size: int
    index_block_size: int
    max_num_tokens: int
    max_num_requests: int
    max_model_len: int
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("latent_block_size", "index_block_size", "max_num_tokens", "max_num_requests", "max_model_len"):
            value = getattr(self, name)
            if not 1 <= value < 2**31:
                raise UsageError(name, needs="a whole number from 1 to 2147483647", got=value)
        for name, cache_format, width in (
            ("latent cache", self.latent, self.dims.head_dim),
            ("index cache", self.index, self.dims.index_head_dim),
        ):
            if cache_format.width != width:
                raise UsageError(f"{name} {cache_format}", needs=f"rows of {width} values", got=cache_format.width)
