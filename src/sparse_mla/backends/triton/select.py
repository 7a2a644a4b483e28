"""select: in passes through one fixed pool, sample, limit, score and keep, pick, and the rows that failed.

How many programs start follows from host bounds and the device alone; what they do, from lengths on the device.
"""

from __future__ import annotations

from secrets import randbits
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...batch import BatchLayout
from ...errors import StrictModeError
from ...shapes import dtype_name
from ...workspace import Workspace, packed_bytes
from .agreement import scores_agree
from .launch import INTERPRETED, early, launch
from .operands import TRITON_TYPES, empty_view, readable, row_stride, rows_of, torch_dtype
from .pick import pick, pick_failed, set_limits
from .runs import Run, requests_per_tile, runs
from .scores import score_rows, score_tiles
from .scratch import (
    candidates,
    pass_rows,
    power_of_two,
    sample_rank,
    sample_stride,
    samples,
    select_buffers,
)
from .tuning import DECODE_THRESHOLD, operand, pick_warps, row_score_tile, score_tile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...cache import CacheView
    from ...device import Device
    from ...problem import Problem

_WIDTH = 4096
_PROGRAMS_PER_UNIT = 16


class _Inputs(NamedTuple):
    """What every pass of a call reads: tensors, strides and compile-time facts, in the order that kernels take them."""

    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    facts: dict[str, Any]
    operand: str
    query_lens: tuple[int, ...]


class Select:
    """SelectKernel for index_fp8 and plain caches, D_i 32, 64 or 128."""

    def __init__(self, problem: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        self._most_rows = pass_rows(problem, device)
        self.capacity = candidates(problem.dims.index_topk)
        self._stride = sample_stride(problem)
        self._seed = randbits(31)  # of which keys are sampled: what is selected does not depend on it

    def warm_up(self, where: torch.device) -> None:
        """Run every kernel on rows that see nothing, for queries in the cache's dtype and in the activations'.

        Raises:
            KernelError: a kernel does not compile.
            StrictModeError: the two score kernels give different bits.
        """
        problem, dims = self._problem, self._problem.dims
        specs = select_buffers(problem, self._device, 0)
        workspace = Workspace(where)
        workspace.reserve(packed_bytes(specs))
        scratch = workspace.views(specs)
        view = empty_view(problem.index, problem.index_block_size, where)
        nan_rows = torch.zeros(1, dtype=torch.int32, device=where)
        few, many = DECODE_THRESHOLD + 1, score_tile(problem.index.encoding, self._device).rows + 1
        for query_lens in ((1,), (few,), (many,), (few, few)):
            rows = sum(query_lens)
            nobody = torch.full((rows,), -1, dtype=torch.int32, device=where)
            batch = BatchLayout(
                req_id_per_token=nobody,
                visible_lens=nobody,
                block_table=torch.zeros(len(query_lens), 1, dtype=torch.int32, device=where),
                query_lens=query_lens,
                seq_lens=(problem.max_model_len,) * len(query_lens),
            )
            out = torch.empty(rows, dims.index_topk, dtype=torch.int32, device=where)
            weights = torch.zeros(rows, dims.index_n_heads, dtype=torch.float32, device=where)
            for name in dict.fromkeys((problem.index.encoding, problem.dtype)):
                query = torch.zeros(
                    rows, dims.index_n_heads, dims.index_head_dim, dtype=torch_dtype(name), device=where
                )
                self(query, weights, view, batch, out, nobody.clone(), nan_rows, scratch)
        if not scores_agree(self, problem, scratch, where):
            self._seed = 0  # then scores of the exact path differ, and which rows take it must not hang on a draw
            raise StrictModeError("score_rows", needs="the bits of score_tiles", got="others")

    def __call__(
        self,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        view: CacheView,
        batch: BatchLayout,
        out: torch.Tensor,
        lens: torch.Tensor,
        flags: torch.Tensor,
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        inputs = self.inputs(index_q, index_weights, view, batch)
        for run in runs(batch):
            rows = run.stop - run.start
            step = -(-rows // -(-rows // self._most_rows))  # passes of about one size, of whole tiles
            if run.prefill:
                tile = score_tile(inputs.operand, self._device).rows
                step = -(-step // tile) * tile
            for start in range(run.start, run.stop, step):
                part = Run(start, min(start + step, run.stop), run.prefill)
                self.keep(part, inputs, batch.max_seq_len, scratch)
                self._pick(part, inputs, batch.max_seq_len, (out, lens, flags), scratch)

    def inputs(
        self, index_q: torch.Tensor, index_weights: torch.Tensor, view: CacheView, batch: BatchLayout
    ) -> _Inputs:
        dims, encoding = self._problem.dims, view.format.encoding
        multiplied = operand(encoding, dtype_name(index_q.dtype), self._device)
        query, query_encoding = readable(index_q, multiplied)
        keys = rows_of(view, "values")
        values, values_encoding = readable(keys.tensor, multiplied)
        scaled = view.format.rule is not None
        scale = view.field("scale") if scaled else index_weights
        return _Inputs(
            tensors=(
                query,
                index_weights,
                values,
                scale,
                batch.block_table,
                batch.req_id_per_token,
                batch.visible_lens,
            ),
            strides=(
                row_stride("index_q", index_q, dims.index_head_dim),
                row_stride("index_weights", index_weights),
                row_stride("block_table", batch.block_table),
                batch.block_table.shape[1],
                keys.block_stride,
                scale.stride(0),
            ),
            facts={
                "HEADS": dims.index_n_heads,
                "DIM": dims.index_head_dim,
                "ROW_STRIDE": keys.row_stride,
                "BLOCK_SIZE": view.block_size,
                "UNIT": keys.unit,
                "SCALED": scaled,
                "ENCODING": values_encoding,
                "QUERY_ENCODING": query_encoding,
                "OPERAND": TRITON_TYPES[multiplied],
            },
            operand=multiplied,
            query_lens=batch.query_lens,
        )

    def keep(self, run: Run, inputs: _Inputs, longest: int, scratch: Mapping[str, torch.Tensor]) -> None:
        """Sample, set limits, score and keep: afterwards each row of the pass has its candidates in the pool.

        A candidate is a 64-bit word, the score above the position; row i's begin at word ``i * capacity``.
        """
        rows, problem = run.stop - run.start, self._problem
        pool = scratch["pool"]
        limits = (scratch["limit"], scratch["limit_position"], scratch["kept"])
        arguments = (
            *inputs.tensors,
            *limits,
            pool,
            pool.view(torch.int64),
            self._seed,
            run.start,
            *inputs.strides,
        )
        sampling = {"CAPACITY": self.capacity, "STRIDE": self._stride, "SAMPLES": samples(problem)}
        if longest > self.capacity:
            self._score(run, -(-longest // self._stride), arguments, inputs, sampling)
        launch(
            set_limits,
            (rows,),
            *inputs.tensors[-2:],
            *limits,
            scratch["failed"],
            pool,
            self._seed,
            run.start,
            inputs.strides[3],
            RANK=sample_rank(problem),
            BLOCK_SIZE=inputs.facts["BLOCK_SIZE"],
            **sampling,
            **early(self._device),
            num_warps=4,
        )
        self._score(run, longest, arguments, inputs, sampling | {"STRIDE": 0})

    def _score(
        self, run: Run, keys: int, arguments: tuple[Any, ...], inputs: _Inputs, sampling: dict[str, int]
    ) -> None:
        rows = run.stop - run.start
        facts: dict[str, int]
        if run.prefill:
            tile, kernel = score_tile(inputs.operand, self._device), score_tiles
            several = requests_per_tile(inputs.query_lens, run, tile.rows)
            if rows <= tile.rows and several == 1:
                tile = score_tile(inputs.operand, self._device, few=True)
            in_place = tile.in_place and not INTERPRETED
            facts = {"ROWS": tile.rows, "SEVERAL": several > 1, "PTX": in_place}
            arguments, groups = (*arguments, run.stop), (-(-rows // tile.rows), several)
        else:
            tile, kernel = row_score_tile(inputs.operand, self._device), score_rows
            facts, groups = self._heads, (rows, 1)
        width = tile.sample_keys if sampling["STRIDE"] else tile.keys
        programs = -(-keys // width)
        if not run.prefill:  # these walk
            programs = min(programs, max(1, _PROGRAMS_PER_UNIT * self._device.units // rows))
        launch(
            kernel,
            (programs, *groups),
            *arguments,
            **inputs.facts,
            **facts,
            **sampling,
            KEYS=width,
            STAGES=tile.stages,
            **early(self._device),
            **tile.options,
        )

    def _pick(
        self,
        run: Run,
        inputs: _Inputs,
        longest: int,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """The best of each row's candidates, in order; rows that have not the right number of them, the exact way."""
        rows, topk = run.stop - run.start, self._problem.dims.index_topk
        launch(
            pick,
            (rows,),
            *inputs.tensors[-2:],
            scratch["limit_position"],
            scratch["kept"],
            scratch["failed"],
            scratch["pool"].view(torch.int64),
            *results,
            run.start,
            inputs.strides[3],
            row_stride("out", results[0]),
            TOPK=topk,
            TOPK_PADDED=power_of_two(topk),
            BLOCK_SIZE=inputs.facts["BLOCK_SIZE"],
            CAPACITY=self.capacity,
            **early(self._device),
            num_warps=pick_warps(self.capacity, self._device),
        )
        if longest > self.capacity:
            self._pick_failed(run, inputs, longest, results, scratch)

    def _pick_failed(
        self,
        run: Run,
        inputs: _Inputs,
        longest: int,
        results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scratch: Mapping[str, torch.Tensor],
    ) -> None:
        """As many programs as rows of scores fit into the pool; without failed rows they leave."""
        pool, topk = scratch["pool"], self._problem.dims.index_topk
        words = -(-longest // _WIDTH) * _WIDTH
        tile = row_score_tile(inputs.operand, self._device)
        launch(
            pick_failed,
            (min(self._device.units, run.stop - run.start, max(1, pool.numel() // words)),),
            *inputs.tensors,
            scratch["failed"],
            pool,
            *results,
            run.start,
            *inputs.strides,
            row_stride("out", results[0]),
            words,
            **inputs.facts,
            **self._heads,
            TOPK=topk,
            KEYS=tile.keys,
            STAGES=tile.stages,
            WIDTH=_WIDTH,
            **early(self._device),
            num_warps=8,
        )

    @property
    def _heads(self) -> dict[str, int]:
        padded = max(16, power_of_two(self._problem.dims.index_n_heads))
        return {"HEADS_PADDED": padded, "LEVELS": padded.bit_length() - 1}
