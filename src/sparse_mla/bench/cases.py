"""What is timed: the stages of a GLM-5.1 or DeepSeek-V3.2 layer on one rank, at the lengths where selection matters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..attention import SparseMLA
from ..batch import BatchLayout
from ..cache import CacheView
from ..plan import make_plan
from ..reference.write import decode_rows
from ..testing.compare import check_attention, check_selection
from ..testing.geometries import GLM_TP4
from ..workspace import Workspace

if TYPE_CHECKING:
    from ..device import Device
    from ..plan import Plan
    from ..testing.compare import Difference

_LATENT_BYTES = 1152


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One timed call: ``rows`` query tokens of each of ``requests`` requests of ``context`` tokens."""

    stage: str
    heads: int
    rows: int
    requests: int
    context: int
    index_topk: int = GLM_TP4.dims.index_topk

    @property
    def decode(self) -> bool:
        """One query token a request."""
        return self.rows == 1

    def __str__(self) -> str:
        rows = f"{self.requests} x 1" if self.decode else str(self.rows)
        name = f"{self.stage} {rows} x {self.context}, {self.heads} heads"
        return name if self.index_topk == GLM_TP4.dims.index_topk else f"{name}, index_topk {self.index_topk}"


def shapes(*, small: bool) -> tuple[Shape, ...]:
    """The published shapes; on a CPU, ``small``, few rows of one rank and of the tiny model, in a minute or two."""
    if small:
        sizes = ((1, 4096), (8, 4096), (256, 16384))
        select = [Shape(stage="select", heads=32, rows=rows, requests=1, context=context) for rows, context in sizes]
        select.append(replace(select[-1], heads=4, index_topk=64))
        return (*select, *(replace(one, stage="attend", heads=min(one.heads, 16)) for one in select))
    prefill = partial(Shape, requests=1, context=131072)
    decode = partial(Shape, rows=1)
    return (
        prefill(stage="select", heads=32, rows=2048),
        prefill(stage="select", heads=64, rows=2048),
        *(prefill(stage="select", heads=32, rows=rows) for rows in (64, 128)),
        *(decode(stage="select", heads=32, requests=count, context=131072) for count in (1, 32, 128)),
        *(prefill(stage="attend", heads=heads, rows=4096) for heads in (8, 16, 32, 64, 128)),
        *(decode(stage="attend", heads=16, requests=count, context=16384) for count in (1, 32, 128)),
        *(
            decode(stage="attend", heads=heads, requests=count, context=16384)
            for heads in (32, 64)
            for count in (1, 128)
        ),
    )


class Prepared:
    """Caches of random rows, queries and a warm operator for one shape; ``call`` is what is timed."""

    def __init__(self, shape: Shape, facts: Device, where: torch.device, *, backend: str, strict: bool) -> None:
        dims = GLM_TP4.dims
        dims = replace(dims, index_topk=shape.index_topk)
        selecting = shape.stage == "select"
        dims = replace(dims, index_n_heads=shape.heads) if selecting else replace(dims, num_heads=shape.heads)
        rows = shape.rows * shape.requests
        geometry = replace(GLM_TP4, dims=dims)
        problem = geometry.problem(
            max_num_tokens=rows,
            max_num_requests=shape.requests,
            max_model_len=shape.context,
            deterministic=strict,
        )
        self.shape, self.dims, self.where = shape, dims, where
        self.operator = SparseMLA(make_plan(problem, facts, backend=backend), Workspace(where), where)
        self.operator.warm_up()
        self.plan: Plan = self.operator.plan
        torch.manual_seed(0)
        blocks = -(-shape.context // geometry.block_size)
        table = torch.randperm(shape.requests * blocks, device=where).view(shape.requests, blocks).to(torch.int32)
        self.batch = BatchLayout.build(
            query_lens=[shape.rows] * shape.requests, seq_lens=[shape.context] * shape.requests, block_table=table
        )
        cache_format = geometry.index if shape.stage == "select" else geometry.latent
        size = (shape.requests * blocks, geometry.block_size, cache_format.row_bytes)
        self.view = CacheView.of(torch.empty(size, dtype=torch.uint8, device=where), cache_format)
        _fill(self.view.field("values"))
        if shape.stage == "select":
            self.view.field("scale").uniform_(0.01, 0.26)
            query = torch.randn(rows, shape.heads, dims.index_head_dim, device=where)
            self.query = query.to(self.view.field("values").dtype)
            self.weights = torch.rand(rows, shape.heads, device=where)
            self.out = torch.empty(rows, dims.index_topk, dtype=torch.int32, device=where)
            self.lens = torch.empty(rows, dtype=torch.int32, device=where)
        else:
            self.query = torch.randn(rows, shape.heads, dims.head_dim, device=where).bfloat16()
            few = max(dims.index_topk, shape.context - shape.rows)
            picked = torch.randint(0, few, (rows, dims.index_topk), device=where, dtype=torch.int32)
            self.indices = picked.sort(-1).values
            self.out = torch.empty(rows, shape.heads, dims.kv_lora_rank, dtype=torch.bfloat16, device=where)

    def call(self) -> None:
        """What is timed."""
        if self.shape.stage == "select":
            self.operator.select(self.query, self.weights, self.view, self.batch, out=self.out, lens=self.lens)
        else:
            scale = self.dims.softmax_scale
            self.operator.attend(self.query, self.view, self.indices, self.batch, scale, out=self.out)

    def judge(self, got: torch.Tensor | None = None) -> Difference | None:
        """The first and the last row against the reference, on what the caches hold: of our call, or of ``got``."""
        if got is None:
            self.call()
            got = self.out
        units = self.where.type != "cpu"
        for row in (0, self.out.shape[0] - 1):
            request, seen = (int(field[row]) for field in (self.batch.req_id_per_token, self.batch.visible_lens))
            if self.shape.stage == "select":
                keys, scale = decode_rows(self.view, self._slots(request, torch.arange(seen)))
                asked = self.query[row].cpu(), self.weights[row].cpu()
                chosen = got[row] if got is self.out else got[row].to(torch.int32).sort().values  # others need not sort
                wrong = check_selection(row, chosen.cpu(), *asked, keys, scale, matrix_units=units)
            else:
                latent, _ = decode_rows(self.view, self._slots(request, self.indices[row].cpu().long()))
                asked_q, scale_q = self.query[row].cpu(), self.dims.softmax_scale
                wrong = check_attention(row, got[row].cpu(), None, asked_q, latent, scale_q, matrix_units=units)
            if wrong is not None:
                return wrong
        return None

    def floor_us(self, best: dict[str, float]) -> float:
        """The larger of arithmetic (fp8 at twice the measured bf16 rate) and bytes, each input read once."""
        shape, rows = self.shape, self.out.shape[0]
        if shape.stage == "select":
            pairs = float(self.batch.visible_lens.sum())
            arithmetic = 2 * pairs * shape.heads * self.dims.index_head_dim / (2 * best["matmul_tflops"]) / 1e6
            return max(arithmetic, shape.requests * shape.context * 132 / best["copy_gbps"] / 1e3)
        pairs = rows * self.dims.index_topk
        arithmetic = (
            2 * pairs * shape.heads * (self.dims.head_dim + self.dims.kv_lora_rank) / best["matmul_tflops"] / 1e6
        )
        return max(arithmetic, pairs * _LATENT_BYTES / best["gather_gbps"] / 1e3)

    def _slots(self, request: int, positions: torch.Tensor) -> list[int]:
        size = self.view.block_size
        blocks = self.batch.block_table[request].cpu().long()
        slots: list[int] = (blocks[positions // size] * size + positions % size).tolist()
        return slots


def _fill(values: torch.Tensor) -> None:
    """Random rows, a part at a time: a cache may be most of the memory."""
    for part in values.split(4096):
        part.copy_(torch.randn(part.shape, device=values.device))
