"""What the Triton stages use, in bytes, and in which mode they run. No torch here: ``plan`` runs without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...workspace import BufferSpec
from .tuning import attend_split

if TYPE_CHECKING:
    from ...device import Device
    from ...problem import Problem

COUNTER_WORDS = 8
"""Words from one row's counter to the next: each in a sector of its own, or their atomic adds would queue."""
_MIB = 1 << 20
_PLACES_BYTES = 32 * _MIB
_ROW_TILE = 64
_LEAST_CANDIDATES = 4096
_LEAST_STRIDE = 32
_MOST_SAMPLES = 16384


def power_of_two(value: int) -> int:
    """The least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def candidates(topk: int) -> int:
    """Candidates that a row keeps. A sampled threshold lets about 2 · topk pass, and a quarter more or less."""
    return max(_LEAST_CANDIDATES, power_of_two(4 * topk))


def sample_stride(problem: Problem) -> int:
    """Keys for each sampled one: a constant of the plan, so that nothing about a row depends on its neighbours."""
    return max(_LEAST_STRIDE, power_of_two(-(-problem.max_model_len // _MOST_SAMPLES)))


def samples(problem: Problem) -> int:
    """Sampled keys of the longest row, padded to a power of two."""
    return max(128, power_of_two(-(-problem.max_model_len // sample_stride(problem))))


def sample_rank(problem: Problem) -> int:
    """Rank of the sampled score that becomes a row's limit.

    ``topk / stride`` of the best are expected in the sample, give or take the square root; six of those more, and the
    row fails once in a hundred million. Twice ``topk`` pass, where ``candidates`` holds four times.
    """
    expected = problem.dims.index_topk / sample_stride(problem)
    return int(expected + 6 * expected**0.5 + 8)


def row_words(problem: Problem) -> int:
    """32-bit words of scratch a row needs: first its sampled scores; then, in their place, candidates of two words."""
    return max(2 * candidates(problem.dims.index_topk), samples(problem))


def pool_words(problem: Problem, device: Device) -> int:
    """32-bit words of select's pool: about the last-level cache, whatever the context.

    It must hold one row of scores, for the exact path, which a context of 8 million tokens still does at 32 MiB.
    """
    nbytes = min(max(device.l2_bytes, 32 * _MIB), 128 * _MIB)
    return max(nbytes // 4, row_words(problem), power_of_two(problem.max_model_len))


def pass_rows(problem: Problem, device: Device) -> int:
    """Query rows whose candidates fit into the pool together: whole row tiles where one fits."""
    rows = pool_words(problem, device) // row_words(problem)
    return rows // _ROW_TILE * _ROW_TILE or rows


def select_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """The pool, and for each row of a pass its threshold, how many candidates passed, and a list of rows that failed."""
    del budget
    rows = pass_rows(problem, device)
    return (
        BufferSpec(name="pool", shape=(pool_words(problem, device),), dtype="f32"),
        BufferSpec(name="limit", shape=(rows,), dtype="f32"),
        BufferSpec(name="limit_position", shape=(rows,), dtype="i32"),
        BufferSpec(name="kept", shape=(rows, COUNTER_WORDS), dtype="i32"),
        BufferSpec(name="failed", shape=(rows + 1,), dtype="i32"),
    )


def attend_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    """Where the selected rows of each token are; and partial results of calls that split a token's list over programs."""
    del budget
    split, dims = attend_split(problem, device), problem.dims
    places = power_of_two(max(dims.index_topk, split.segment))
    rows = min(problem.max_num_tokens, max(1, _PLACES_BYTES // (4 * places)))
    located = (
        BufferSpec(name="places", shape=(rows, places), dtype="i32"),
        BufferSpec(name="counts", shape=(rows,), dtype="i32"),
    )
    if split.parts == 1:
        return located
    parts = (min(problem.max_num_tokens, split.rows), split.parts, dims.num_heads)
    return (
        *located,
        BufferSpec(name="part", shape=(*parts, dims.kv_lora_rank), dtype="f32"),
        BufferSpec(name="peak", shape=parts, dtype="f32"),
        BufferSpec(name="mass", shape=parts, dtype="f32"),
    )


def no_buffers(problem: Problem, device: Device, budget: int) -> tuple[BufferSpec, ...]:
    del problem, device, budget
    return ()


def attend_mode(problem: Problem, device: Device) -> str:
    """Strict where segments merged in order cost nothing, or on request."""
    return "strict" if attend_split(problem, device).strict else "fast"


def always_strict(problem: Problem, device: Device) -> str:
    """Write has nothing to add up. Select adds in one order; warm-up tries whether its kernels multiply alike too."""
    del problem, device
    return "strict"
