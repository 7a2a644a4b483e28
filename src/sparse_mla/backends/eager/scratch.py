"""What eager's stages use, in bytes. No torch here: ``plan`` runs without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...workspace import BufferSpec

if TYPE_CHECKING:
    from ...device import Device
    from ...problem import Problem

SEGMENT = 512
"""Selected rows that attend reduces in one product; segments are merged in order."""
ATTEND_ROWS = 8
"""Query tokens whose gathers attend batches into one copy."""
KEY_TILE = 4096
"""Index keys of one product in select: their fp32 rows (2 MiB at D_i = 128) stay in a core's cache."""
MAX_SELECT_ROWS = 64
"""Query tokens of a select chunk at most: beyond it the key tile is amortised and more only costs memory."""
_COLUMNS = 32


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectTiles:
    """Row tile and chunk size of select: constants of the problem, so every row is reduced in one fixed order."""

    tokens: int
    context: int
    rows: int

    @classmethod
    def of(cls, problem: Problem, budget: int) -> SelectTiles:
        tokens = max(1, _COLUMNS // problem.dims.index_n_heads)
        context = round_up(problem.max_model_len, KEY_TILE)
        fixed = context * (problem.dims.index_head_dim + 1) * 4
        fit = max(0, budget - fixed) // (context * 4)
        rows = min(MAX_SELECT_ROWS, max(fit, 1), round_up(problem.max_num_tokens, tokens))
        return cls(tokens=tokens, context=context, rows=round_up(rows, tokens))


def strict(problem: Problem, device: Device) -> str:
    del problem, device
    return "strict"


def no_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    del problem, device, budget
    return ()


def select_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """Gathered keys of one request as fp32, their scales, and the scores of one chunk of rows."""
    del device
    dims, tiles = problem.dims, SelectTiles.of(problem, budget)
    columns = tiles.tokens * dims.index_n_heads
    return (
        BufferSpec(name="keys", shape=(tiles.context, dims.index_head_dim), dtype="f32"),
        BufferSpec(name="scale", shape=(tiles.context,), dtype="f32"),
        BufferSpec(name="scores", shape=(tiles.rows, tiles.context), dtype="f32"),
        BufferSpec(name="products", shape=(KEY_TILE, columns), dtype="f32"),
    )


def attend_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """One segment of gathered rows for a tile of query tokens, as stored and as fp32, and the running result."""
    del device, budget
    dims = problem.dims
    rows, heads, width = ATTEND_ROWS, dims.num_heads, dims.head_dim
    return (
        BufferSpec(name="stored", shape=(rows * SEGMENT, problem.latent.row_bytes), dtype="u8"),
        BufferSpec(name="latent", shape=(rows, SEGMENT, width), dtype="f32"),
        BufferSpec(name="scores", shape=(rows, SEGMENT, heads), dtype="f32"),
        BufferSpec(name="part", shape=(rows, heads, dims.kv_lora_rank), dtype="f32"),
        BufferSpec(name="total", shape=(rows, heads, dims.kv_lora_rank), dtype="f32"),
    )
