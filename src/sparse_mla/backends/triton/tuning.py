"""Tile sizes: a table by architecture and geometry. Only what changes no bit may follow from a batch's shape as well.

No torch and no triton here: ``plan`` reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...device import Device
    from ...problem import Problem

DECODE_THRESHOLD = 16
"""Query tokens of a call up to which a request counts as decoding: fast mode may then reduce in another order."""
_ROOMY, _SPACIOUS = 160 << 10, 200 << 10
"""Bytes of shared memory from which one tile of 64 latent rows fits beside the queries, and two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTile:
    """One product of select: ``rows`` query rows by ``keys`` index keys, or ``sample_keys`` where a sample is scored.

    ``registers`` of a thread at most, 0 for any. ``in_place``: the product lies in threads without repetition, so PTX
    may take the scores from there. A score is a sum of its own: how many are in a tile changes no bit.
    """

    rows: int
    keys: int
    sample_keys: int
    warps: int
    stages: int
    registers: int = 0
    in_place: bool = False

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendTile:
    """One product of attend: ``heads`` heads of one token by ``keys`` selected rows, ``width`` columns of a latent row at a time.

    Narrow pieces are addressed with fewer instructions; wide ones suit products that read shared memory as it is.

    ``lone_stages`` is for calls with no more programs than multiprocessors, where each must hide its own latency.
    Stages change no bit.
    """

    heads: int
    keys: int
    width: int
    warps: int
    stages: int
    lone_stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendSplit:
    """How a row's index list is cut.

    Attributes:
        segment: indices of one segment; segments start at fixed places and are merged in order.
        parts: segments of a row, each a program of its own in calls of at most ``rows`` query tokens.
        strict: larger calls reduce segment by segment too, in one program, and so agree in every bit.
    """

    segment: int
    parts: int
    rows: int
    strict: bool


def operand(keys: str, query: str, device: Device) -> str:
    """The dtype in which index keys and queries are multiplied, exactly: the narrowest that holds both.

    fp8 is multiplied as it is where the matrix units take its encoding; else as fp16, which holds every fp8 value.
    """
    if keys == query:
        return "f16" if keys.startswith("fp8") and keys != device.fp8 else keys
    plain = [name for name in (keys, query) if not name.startswith("fp8")]
    return {0: "f16", 1: plain[0] if plain else "", 2: "f32"}[len(plain)]


def _short_waves(device: Device) -> bool:
    """RDNA runs 32 threads a wave, CDNA 64: the same tile needs at least twice the waves."""
    return device.arch.startswith(("gfx11", "gfx12"))


def score_tile(operand: str, device: Device, *, few: bool = False) -> ScoreTile:
    """Many rows of one request: the keys stay, the loop runs over index heads.

    ``few``: all rows of a pass are in one tile, and of one request. Then programs start and end together, and smaller ones,
    which there are more of, hide that better (measured on sm90 alone).
    """
    if operand == "f32":
        return ScoreTile(rows=32, keys=64, sample_keys=64, warps=4, stages=1)
    if device.kind == "rocm":
        return ScoreTile(rows=64, keys=64, sample_keys=64, warps=8 if _short_waves(device) else 4, stages=2)
    keys, sample_keys = (64, 32) if few and device.arch == "sm90" else (128, 128)
    # On Hopper 168 registers let three programs share a multiprocessor; what spills does so after the loop.
    registers = 168 if device.arch == "sm90" and operand == "fp8" else 0
    return ScoreTile(rows=64, keys=keys, sample_keys=sample_keys, warps=4, stages=3, registers=registers, in_place=True)


def row_score_tile(operand: str, device: Device) -> ScoreTile:
    """Keys by all index heads of one row, for decode."""
    keys = 64 if operand == "f32" or device.kind == "rocm" else 128
    return ScoreTile(rows=1, keys=keys, sample_keys=keys, warps=4, stages=1 if operand == "f32" else 2)


def pick_warps(candidates: int, device: Device) -> int:
    """Warps that share the candidates of a row: at most 512 threads, for each of which 128 registers are left."""
    most = 8 if device.kind == "rocm" and not _short_waves(device) else 16
    return max(4, min(most, candidates // 512))


def attend_tile(problem: Problem, device: Device, *, decode: bool = False) -> AttendTile:
    """Heads are padded to the smallest tile that the matrix units take, never the problem to 64.

    Many heads take large tiles, so that fewer read a row; in decode, where programs are few, small ones, unless in strict
    mode both must give the same bits.
    """
    heads, whole, roomy = problem.dims.num_heads, problem.dims.kv_lora_rank, device.shared_bytes > _ROOMY
    if problem.dtype == "f32" or problem.latent.encoding == "f32":
        return AttendTile(heads=16, keys=16, width=whole, warps=4, stages=1, lone_stages=1)
    if device.kind == "rocm":
        tile, keys, warps = 16 if heads <= 16 else 32, 32 if roomy else 16, 16 if _short_waves(device) else 4
        return AttendTile(heads=tile, keys=keys, width=whole, warps=warps, stages=1, lone_stages=1)
    # Up to 32 heads two tiles of 16 rather than one of 32, whose accumulators fill the registers.
    if heads <= 32 or (decode and not problem.deterministic):
        ahead = 5 if device.shared_bytes > _SPACIOUS else 3
        return AttendTile(heads=16, keys=64 if roomy else 32, width=64, warps=4, stages=3, lone_stages=ahead)
    if not roomy:
        return AttendTile(heads=32, keys=32, width=whole, warps=8, stages=3, lone_stages=3)
    # sm100 and sm103 stage all operands of a tile in shared memory.
    keys, stages = (32, 2) if device.arch in {"sm100", "sm103"} else (64, 3)
    return AttendTile(heads=64, keys=keys, width=whole, warps=8, stages=stages, lone_stages=stages)


def attend_split(problem: Problem, device: Device) -> AttendSplit:
    """Segments of 256: enough programs for one row, and few enough that merging costs little."""
    topk, tile = problem.dims.index_topk, attend_tile(problem, device, decode=True)
    segment = max(tile.keys, min(256, -(-topk // tile.keys) * tile.keys))
    blocks = -(-problem.dims.num_heads // tile.heads)
    return AttendSplit(
        segment=segment,
        parts=-(-topk // segment),
        # Beyond half the device parts no longer gain by their number what storing and merging them costs.
        rows=max(1, device.units // (2 * blocks)),
        # A second accumulator of 16 heads fits beside the first.
        strict=problem.deterministic or attend_tile(problem, device).heads <= 16,
    )
