"""What eager's stages use, in bytes. No torch here: ``plan`` runs without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...workspace import BufferSpec

if TYPE_CHECKING:
    from ...device import Device
    from ...problem import Problem

ATTEND_ROWS = 4
"""Query tokens whose gathers attend batches into one copy."""
KEY_TILE = 4096
"""Index keys of one product in select: their fp32 rows (2 MiB at D_i = 128) stay in a core's cache."""
MAX_SELECT_ROWS = 64
"""Query tokens of a select chunk at most: beyond it the key tile is amortised and more only costs memory."""
_COLUMNS = 32
_SEGMENT = 512


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is no less than ``value``."""
    return -(-value // step) * step


def token_tile(index_n_heads: int) -> int:
    """Query tokens of one score product: enough columns for a matrix product to pay, and a constant of the model."""
    return max(1, _COLUMNS // index_n_heads)


def segment(index_topk: int) -> int:
    """Selected rows that attend reduces in one product; segments are merged in order."""
    return min(_SEGMENT, index_topk)


def strict(problem: Problem, device: Device) -> str:
    """The one mode of this backend."""
    del problem, device
    return "strict"


def no_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """Nothing: write needs row-sized temporaries only."""
    del problem, device, budget
    return ()


def select_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """Gathered keys of one request as fp32, their scales, and the scores of one chunk of rows."""
    del device
    dims, tokens = problem.dims, token_tile(problem.dims.index_n_heads)
    context = round_up(problem.max_model_len, KEY_TILE)
    gathered = context * (dims.index_head_dim + 1) * 4
    fit = max(1, (budget - gathered) // (context * 4))
    rows = round_up(min(MAX_SELECT_ROWS, fit, problem.max_num_tokens), tokens)
    return (
        BufferSpec(name="keys", shape=(context, dims.index_head_dim), dtype="f32"),
        BufferSpec(name="scale", shape=(context,), dtype="f32"),
        BufferSpec(name="scores", shape=(rows, context), dtype="f32"),
        BufferSpec(name="products", shape=(KEY_TILE, tokens * dims.index_n_heads), dtype="f32"),
        BufferSpec(name="stored", shape=(KEY_TILE, problem.index.row_bytes), dtype="u8"),
    )


def attend_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """One segment of gathered rows for a tile of query tokens, as stored and as fp32, and the running result."""
    del device, budget
    dims, width = problem.dims, segment(problem.dims.index_topk)
    rows, heads = ATTEND_ROWS, dims.num_heads
    return (
        BufferSpec(name="stored", shape=(rows * width, problem.latent.row_bytes), dtype="u8"),
        BufferSpec(name="latent", shape=(rows, width, dims.head_dim), dtype="f32"),
        BufferSpec(name="scores", shape=(rows, width, heads), dtype="f32"),
        BufferSpec(name="part", shape=(rows, heads, dims.kv_lora_rank), dtype="f32"),
        BufferSpec(name="total", shape=(rows, heads, dims.kv_lora_rank), dtype="f32"),
    )
