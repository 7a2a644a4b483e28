"""One case of the operator target: a prompt, its caches, and the calls of a chunk plan on real operators."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..attention import SparseMLA
from ..batch import BatchLayout
from ..cache import CacheView
from ..quantize import quantize_index_q
from ..testing.inputs import Prompt, scattered_blocks, slots_for
from ..workspace import BufferSpec, Workspace
from .trace import Trace, trace_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..cache import CacheFormat
    from ..dims import MLADims
    from ..plan import Plan
    from .chunks import ChunkPlan, Rows

POISON = 0xFF
"""Fills caches and scratch before each run: NaN in bf16, fp32 and both fp8 encodings."""
BLOCK_SIZE = 64
NEIGHBOUR = 5 * BLOCK_SIZE + 3
"""Tokens of the other request, or all that the prompt has."""
_NEIGHBOUR_ROWS = 3
_SPARE = 3
_SCAN = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """What the layer sees: latents and index keys of every token, queries of the chosen rows (in their order)."""

    kv_c: torch.Tensor
    k_pe: torch.Tensor
    index_k: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor
    q: torch.Tensor

    @classmethod
    def of(cls, prompt: Prompt, rows: Rows, index: CacheFormat, device: torch.device) -> Inputs:
        """Index queries are quantised where the index keys are, with their scales folded into the weights."""
        index_q, weights = prompt.at("index_q", rows.query), prompt.at("index_weights", rows.query)
        if index.name == "index_fp8":
            index_q, scale = quantize_index_q(index_q, index.encoding)
            weights = weights * scale
        return cls(
            kv_c=prompt.rows("kv_c", 0, prompt.length).to(device),
            k_pe=prompt.rows("k_pe", 0, prompt.length).to(device),
            index_k=prompt.rows("index_k", 0, prompt.length).to(device),
            index_q=index_q.to(device),
            index_weights=weights.to(device),
            q=prompt.at("q", rows.query).to(device),
        )


class Lane:
    """Layers that share one workspace: the first selects, and the others reuse its indices (IndexShare)."""

    def __init__(self, plans: Mapping[str, Plan], device: torch.device) -> None:
        self.workspace = Workspace(device)
        self.workspace.reserve(max(plan.scratch_bytes for plan in plans.values()))
        self.layers = {name: SparseMLA(plan, self.workspace, device) for name, plan in plans.items()}
        for layer in self.layers.values():
            layer.warm_up()
        self.workspace.lock()
        self.workspace.fill(POISON)

    @property
    def nan_rows(self) -> int:
        """Rows with only NaN scores since the lane was made."""
        return sum(int(layer.nan_rows) for layer in self.layers.values())

    def touched_bytes(self) -> int:
        """How much of the arena, from its start, has been written to since it was poisoned."""
        arena = self.workspace.views((BufferSpec(name="all", shape=(self.workspace.nbytes,), dtype="u8"),))["all"]
        for first in reversed(range(0, arena.numel(), _SCAN)):
            written = (arena[first : first + _SCAN] != POISON).nonzero()
            if written.numel():
                return first + int(written[-1]) + 1
        return 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Run:
    """One chunk plan, computed.

    Attributes:
        stages: traces by stage; see ``Case.stages``.
        strays: caches in which a row that no token owns was written to.
        sparse_rows: query rows with more visible keys than index_topk, all of which selected index_topk.
        short_rows: rows that selected neither index_topk nor all that they saw.
    """

    plan: ChunkPlan
    stages: Mapping[str, Trace]
    strays: tuple[str, ...]
    sparse_rows: int
    short_rows: int
    nan_rows: int
    touched_bytes: int


class Case:
    """A prompt of one length and kind of inputs, with one index cache and a latent cache for each format.

    Without a latent format only index keys are written and selected from.
    """

    def __init__(
        self,
        dims: MLADims,
        index: CacheFormat,
        latents: Mapping[str, CacheFormat],
        inputs: Inputs,
        rows: Rows,
        *,
        block_stride: int = 0,
    ) -> None:
        self.dims, self.inputs, self.rows = dims, inputs, rows
        self.total = int(inputs.kv_c.shape[0])
        self.device = inputs.kv_c.device
        self._lens = (self.total, min(NEIGHBOUR, self.total))
        num_blocks = scattered_blocks(self._lens, BLOCK_SIZE, seed=0, spare=_SPARE)[1]
        self.index = _cache(index, num_blocks, block_stride, self.device)
        self.latents = {name: _cache(kind, num_blocks, block_stride, self.device) for name, kind in latents.items()}
        self.table = torch.empty(0)
        self._keep = frozenset(rows.reference)

    @property
    def stages(self) -> dict[str, str]:
        """Each stage that is hashed, in order, and its verb."""
        outputs = {f"output {name}": "attend" for name in self.latents}
        latents = {f"latent cache {name}": "write" for name in self.latents}
        return {"index cache": "write", **latents, "indices": "select", **outputs}

    def run(self, plan: ChunkPlan, lane: Lane, make_lane: Callable[[], Lane], *, seed: int) -> Run:
        """Compute the case under one plan, in caches full of poison, on pages placed by ``seed``."""
        table, _ = scattered_blocks(self._lens, BLOCK_SIZE, seed=seed, spare=_SPARE)
        self.table = table.to(self.device)
        for view in (self.index, *self.latents.values()):
            for field in view.format.fields:  # memory between the blocks is never touched
                view.field(field.name).view(torch.uint8).fill_(POISON)
        traces = {stage: Trace(self._keep) for stage, verb in self.stages.items() if verb != "write"}
        lane.workspace.fill(POISON)
        before, lanes, lens_seen = lane.nan_rows, [], []
        if plan.beside:
            self._write(lane, 0, self._lens[1], row=1)
        for start, stop in plan.calls():
            here = make_lane() if plan.fresh else lane
            lens_seen.append(self._call(here, start, stop, beside=plan.beside, traces=traces))
            if plan.fresh:
                lanes.append((here.nan_rows, here.touched_bytes()))
        visible = torch.tensor(self.rows.query) + 1
        selected = torch.cat(lens_seen)
        full = visible.clamp(max=self.dims.index_topk)
        caches = {"index cache": self.index} | {f"latent cache {name}": view for name, view in self.latents.items()}
        return Run(
            plan=plan,
            stages={name: trace_cache(view, self._blocks(0, self.total), self.total) for name, view in caches.items()}
            | traces,
            strays=tuple(name for name, view in caches.items() if self._strays(view, beside=plan.beside)),
            sparse_rows=int(((visible > self.dims.index_topk) & (selected == full)).sum()),
            short_rows=int((selected != full).sum()),
            nan_rows=lane.nan_rows - before + sum(nan_rows for nan_rows, _ in lanes),
            touched_bytes=max([lane.touched_bytes()] + [touched for _, touched in lanes]),
        )

    def _call(self, lane: Lane, start: int, stop: int, *, beside: bool, traces: Mapping[str, Trace]) -> torch.Tensor:
        """Write the tokens ``[start, stop)``, then select and attend for those that are looked at."""
        self._write(lane, start, stop)
        first, last = (bisect_left(self.rows.query, edge) for edge in (start, stop))
        rows = self.rows.query[first:last]
        if not rows:
            return torch.empty(0, dtype=torch.int64)
        extra = _NEIGHBOUR_ROWS if beside else 0
        wanted = torch.tensor([*range(extra), *(extra + row - start for row in rows)], device=self.device)
        layout = BatchLayout.build(
            query_lens=[extra, stop - start], seq_lens=[self._lens[1], stop], block_table=self.table[[1, 0]]
        )
        batch = layout.take(wanted, [extra, len(rows)])
        index_q, weights, q = (
            torch.cat((tensor[:extra], tensor[first:last]))
            for tensor in (self.inputs.index_q, self.inputs.index_weights, self.inputs.q)
        )
        leader = next(iter(lane.layers.values()))
        lens = torch.empty(len(wanted), dtype=torch.int32, device=self.device)
        indices = leader.select(index_q, weights, self.index, batch, lens=lens)
        traces["indices"].add(rows, indices[extra:])
        for name, view in self.latents.items():
            got = lane.layers[name].attend(q, view, indices, batch, self.dims.softmax_scale, return_lse=True)
            traces[f"output {name}"].add(rows, *(part[extra:] for part in got if part is not None))
        return lens[extra:].long().cpu()

    def _write(self, lane: Lane, start: int, stop: int, row: int = 0) -> None:
        slots = slots_for(self.table[row].cpu(), BLOCK_SIZE, start, stop).to(self.device)
        leader = next(iter(lane.layers.values()))
        leader.write_index(self.inputs.index_k[start:stop], self.index, slots)
        for name, view in self.latents.items():
            lane.layers[name].write_latent(self.inputs.kv_c[start:stop], self.inputs.k_pe[start:stop], view, slots)

    def _blocks(self, row: int, length: int) -> torch.Tensor:
        return self.table[row, : -(-length // BLOCK_SIZE)].long()

    def _strays(self, view: CacheView, *, beside: bool) -> bool:
        """Whether a row outside the requests lost its poison: in a block that no request has, or past a last row."""
        free = torch.ones(view.num_blocks, BLOCK_SIZE, dtype=torch.bool, device=self.device)
        for row, length in enumerate(self._lens[: 1 + beside]):
            blocks = self._blocks(row, length)
            free[blocks] = False
            free[blocks[-1], length % BLOCK_SIZE or BLOCK_SIZE :] = True
        fields = (view.field(field.name).view(torch.uint8) for field in view.format.fields)
        return any(bool((field[free] != POISON).any()) for field in fields)


def _cache(kind: CacheFormat, num_blocks: int, block_stride: int, device: torch.device) -> CacheView:
    size = BLOCK_SIZE * kind.row_bytes
    stride = max(1, block_stride // size) * size
    storage = torch.empty(num_blocks * stride, dtype=torch.uint8, device=device)
    return CacheView(
        storage=storage, format=kind, block_size=BLOCK_SIZE, block_stride_bytes=stride, num_blocks=num_blocks
    )
