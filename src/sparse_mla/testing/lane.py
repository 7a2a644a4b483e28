"""A lane as an engine drives it: caches full of junk, calls cut in any way, scratch poisoned before each verb."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from ..batch import BatchLayout
from ..quantize import quantize_index_q
from ..reference.write import decode_rows
from ..shapes import DTYPE_NAMES
from ..workspace import Workspace
from .compare import ConformanceError, check_attention, check_selection, demand, first_difference, require
from .inputs import Prompt, cache_of, interleaved, scattered_blocks, slots_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..cache import CacheView
    from ..problem import Problem
    from .candidates import Candidate
    from .geometries import Geometry

POISON = 0xFF
"""NaN in every float dtype, −1 in every integer one."""
JUNK = 0x7F7F7F7F
"""What stands in an index buffer before select fills it: a position far beyond every request."""


class Span(NamedTuple):
    """Tokens ``[start, stop)`` of a request, in one call."""

    request: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many tokens."""
        return self.stop - self.start


class Rows(NamedTuple):
    """What the verbs answered: ``indices [N, K] i32``, ``lens [N] i32``, ``out [N, H, D_c]``, ``lse [N, H] f32``."""

    indices: torch.Tensor
    lens: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def at(self, rows: slice | torch.Tensor | Sequence[int] | int) -> Rows:
        """A subset of the rows."""
        return Rows(*(field[rows] for field in self))


class Asked(NamedTuple):
    """Inputs of select and attend: ``index_q [N, H_i, D_i]``, ``weights [N, H_i] f32``, ``q [N, H, D_c + D_r]``."""

    index_q: torch.Tensor
    weights: torch.Tensor
    q: torch.Tensor

    def padded(self, rows: int) -> Asked:
        """With rows of NaN at the end, as stale memory may hold."""
        return Asked(*(padded(field, rows) for field in self))


def padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` rows of NaN more."""
    return torch.cat([rows, torch.full((count, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=rows.device)])


def demand_same(got: Rows, wanted: Rows, where: str) -> None:
    """Equal in every bit of every field, NaN included."""
    for name in ("lens", "indices", "out", "lse"):
        ours, theirs = (getattr(rows, name).cpu().unsqueeze(-1) for rows in (got, wanted))
        demand(first_difference(name, ours, theirs), where)


def demand_empty(rows: Rows, where: str) -> None:
    """Rows that see nothing: indices −1, length 0, output exactly 0, lse −inf."""
    require((rows.indices == -1).all() and (rows.lens == 0).all(), f"{where}: selected something")
    require((rows.out == 0).all() and (rows.lse == -torch.inf).all(), f"{where}: output is not 0 with lse −inf")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """The two caches of a layer, and the blocks of each request in them (``[R, B] i32``)."""

    geometry: Geometry
    prompts: tuple[Prompt, ...]
    latent: CacheView
    index: CacheView
    table: torch.Tensor

    def slots(self, span: Span) -> torch.Tensor:
        """Slots ``[N] i64`` of the span's tokens, the same in both caches."""
        return slots_for(self.table[span.request].cpu(), self.geometry.block_size, span.start, span.stop)

    def rows(self, name: str, spans: Iterable[Span]) -> torch.Tensor:
        """Rows of the spans' prompts, one after the other."""
        nobody = Prompt(dims=self.geometry.dims, length=0, seed=0, dtype=self.geometry.dtype)
        pieces = [self.prompts[span.request].rows(name, span.start, span.stop) for span in spans]
        return torch.cat([nobody.rows(name, 0, 0), *pieces])

    def asked(self, spans: Sequence[Span]) -> Asked:
        """The spans' queries; ``index_q`` in fp8 where the keys are, its scales folded into the weights."""
        index_q, weights, q = (self.rows(name, spans) for name in ("index_q", "index_weights", "q"))
        if self.geometry.index.encoding.startswith("fp8"):
            index_q, scale = quantize_index_q(index_q, self.geometry.index.encoding)
            weights = weights * scale
        return Asked(index_q, weights, q)

    def batch(self, spans: Sequence[Span], padding: int = 0) -> BatchLayout:
        """The call that holds the spans, in their order."""
        requests = torch.tensor([span.request for span in spans], dtype=torch.int64, device=self.table.device)
        return BatchLayout.build(
            query_lens=[span.size for span in spans],
            seq_lens=[span.stop for span in spans],
            block_table=self.table[requests],
            num_tokens=sum(span.size for span in spans) + padding,
        )


def new_layer(
    geometry: Geometry, prompts: Sequence[Prompt], *, seed: int = 0, where: str = "cpu", gap_bytes: int = 0
) -> Layer:
    """Caches of junk with room for the prompts, in shuffled blocks."""
    size = geometry.block_size
    table, num_blocks = scattered_blocks([prompt.length for prompt in prompts], size, seed=seed)
    return Layer(
        geometry=geometry,
        prompts=tuple(prompts),
        latent=cache_of(geometry.latent, size, num_blocks, seed=seed, gap_bytes=gap_bytes, where=where),
        index=cache_of(geometry.index, size, num_blocks, seed=seed + 1, gap_bytes=gap_bytes, where=where),
        table=table.to(where),
    )


def layers_in_one(
    geometry: Geometry, prompts: Sequence[Sequence[Prompt]], table: torch.Tensor, num_blocks: int, *, seed: int = 0
) -> list[Layer]:
    """Layers whose blocks lie side by side in one allocation, as in an engine's packed pool.

    Args:
        prompts: the prompts of each layer.
        table: ``[R, B] i32``, the same for all layers.
    """
    formats = [cache_format for _ in prompts for cache_format in (geometry.latent, geometry.index)]
    views = iter(interleaved(formats, geometry.block_size, num_blocks, seed=seed, where=str(table.device)))
    return [
        Layer(geometry=geometry, prompts=tuple(own), latent=next(views), index=next(views), table=table)
        for own in prompts
    ]


class Lane:
    """An operator with its own scratch; ``poison`` is the byte that fills the scratch before every verb."""

    def __init__(self, candidate: Candidate, problem: Problem, poison: int = POISON) -> None:
        self.workspace = Workspace(candidate.where)
        self.operator = candidate.operator(problem, self.workspace)
        self.workspace.lock()
        self.where = candidate.where
        self.poison = poison

    def write(self, layer: Layer, spans: Sequence[Span], padding: int = 0) -> None:
        """Write the spans' rows into both caches; half of the padding has a negative slot, the rest none at all."""
        slots = torch.cat([torch.empty(0, dtype=torch.int64), *(layer.slots(span) for span in spans)])
        slots = pad(slots, (0, padding // 2), value=-1).to(self.where)
        kv_c, k_pe, index_k = (
            padded(layer.rows(name, spans), padding).to(self.where) for name in ("kv_c", "k_pe", "index_k")
        )
        self.workspace.fill(self.poison)
        self.operator.write_latent(kv_c, k_pe, layer.latent, slots)
        self.workspace.fill(self.poison)
        self.operator.write_index(index_k, layer.index, slots)

    def read(self, layer: Layer, spans: Sequence[Span], padding: int = 0) -> list[Rows]:
        """Select and attend for the spans in one call: what each span got. Padding rows must come out empty."""
        rows = self.ask(layer, layer.batch(spans, padding), layer.asked(spans).padded(padding))
        ends = list(accumulate(span.size for span in spans))
        demand_empty(rows.at(slice(ends[-1] if ends else 0, None)), "padding rows")
        return [rows.at(slice(end - span.size, end)) for span, end in zip(spans, ends, strict=True)]

    def step(self, layer: Layer, spans: Sequence[Span], padding: int = 0) -> list[Rows]:
        """One engine step: the new tokens are written, then read."""
        self.write(layer, spans, padding)
        return self.read(layer, spans, padding)

    def select(self, layer: Layer, batch: BatchLayout, asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and lengths, written into buffers full of junk that are wider than select may write."""
        topk = layer.geometry.dims.index_topk
        wide = torch.full((batch.num_tokens, topk + 3), JUNK, dtype=torch.int32, device=self.where)
        lens = torch.full((batch.num_tokens,), JUNK, dtype=torch.int32, device=self.where)
        index_q, weights = asked.index_q.to(self.where), asked.weights.to(self.where)
        self.workspace.fill(self.poison)
        self.operator.select(index_q, weights, layer.index, batch, out=wide[:, :topk], lens=lens)
        require((wide[:, topk:] == JUNK).all(), "select wrote past its K columns")
        return wide[:, :topk], lens

    def attend(
        self, layer: Layer, batch: BatchLayout, asked: Asked, indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse, the output written into a buffer full of NaN."""
        dims = layer.geometry.dims
        dtype = getattr(torch, DTYPE_NAMES[layer.geometry.dtype])
        out = torch.full(
            (batch.num_tokens, dims.num_heads, dims.kv_lora_rank), torch.nan, dtype=dtype, device=self.where
        )
        self.workspace.fill(self.poison)
        _, lse = self.operator.attend(
            asked.q.to(self.where), layer.latent, indices, batch, dims.softmax_scale, out=out, return_lse=True
        )
        if lse is None:
            raise ConformanceError("attend gave no lse")
        return out, lse

    def ask(self, layer: Layer, batch: BatchLayout, asked: Asked) -> Rows:
        """Select, then attend over what was selected."""
        indices, lens = self.select(layer, batch, asked)
        out, lse = self.attend(layer, batch, asked, indices)
        return Rows(indices, lens, out, lse)


def whole(prompts: Sequence[Prompt]) -> list[Span]:
    """Every prompt in full, in one call."""
    return [Span(request, 0, prompt.length) for request, prompt in enumerate(prompts)]


@lru_cache(maxsize=64)
def one_shot(candidate: Candidate, geometry: Geometry, prompt: Prompt) -> Rows:
    """The prompt alone, in one call, by a new operator on caches of its own: what every other way must equal."""
    count = max(prompt.length, 1)
    lane = Lane(candidate, geometry.problem(max_num_tokens=count, max_num_requests=1, max_model_len=count))
    layer = new_layer(replace(geometry, block_size=64), [prompt], where=candidate.where)
    return lane.step(layer, whole([prompt]))[0]


def demand_reference(
    layer: Layer, request: int, rows: Rows, positions: Sequence[int], *, exact: bool = False, where: str = ""
) -> None:
    """Judge rows by the reference over what the caches hold.

    Args:
        rows: of the request, one for each position.
        exact: the scores are exact in fp32 in any order, so the indices must equal the reference's.
    """
    last = max(positions, default=-1)
    slots = layer.slots(Span(request, 0, last + 1)).tolist()
    keys, k_scale = decode_rows(layer.index, slots)
    latent, _ = decode_rows(layer.latent, slots)
    dims = layer.geometry.dims
    for row, position in enumerate(positions):
        asked, seen = layer.asked([Span(request, position, position + 1)]), position + 1
        got = rows.at(row)
        label = f"{where} request {request} position {position}"
        q, weights = asked.index_q[0], asked.weights[0]
        units = got.out.device.type != "cpu"
        selection = check_selection(
            row, got.indices, q, weights, keys[:seen], k_scale[:seen], exact=exact, matrix_units=units
        )
        demand(selection, label)
        chosen = got.indices[got.indices >= 0].long().cpu()
        require(int(got.lens) == chosen.numel(), f"{label}: topk_lens is {int(got.lens)}, indices {chosen.numel()}")
        demand(
            check_attention(row, got.out, got.lse, asked.q[0], latent[chosen], dims.softmax_scale, matrix_units=units),
            label,
        )
