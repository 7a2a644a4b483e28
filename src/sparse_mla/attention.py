"""SparseMLA: the verbs write, select and attend, in the order in which a layer calls them. START READING HERE.

A layer of a DSA model writes its latents and index keys into caches that the engine owns, selects for each query token
the ``index_topk`` cached tokens that matter, and attends over those alone. What runs each verb was settled in ``Plan``;
here is no choice left, only shape checks, scratch and the call.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .errors import CacheFormatError, KernelError, ShapeError, StrictModeError
from .problem import Stage
from .requirements import Reason
from .shapes import DTYPE_NAMES, bind

if TYPE_CHECKING:
    from .backends.base import AttendKernel, Row, SelectKernel, WriteKernel
    from .batch import BatchLayout
    from .cache import CacheFormat, CacheView
    from .plan import Plan
    from .workspace import Workspace


class AttentionOutput(NamedTuple):
    """``out [T, H, D_c]`` in the activations' dtype; ``lse [T, H] f32``: natural log of Σ exp(scaled score)."""

    out: torch.Tensor
    lse: torch.Tensor | None


class SparseMLA:
    """The three verbs of one stream lane. Holds no cache and no per-request state; not thread-safe.

    ``nan_rows`` counts, on the device, the query rows that saw keys but only NaN scores since it was last zeroed.
    """

    def __init__(self, plan: Plan, workspace: Workspace, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._workspace = workspace
        self._bind(plan)
        self.nan_rows = torch.zeros(1, dtype=torch.int32, device=self.device)
        dims = plan.problem.dims
        self._sizes = {
            "H": dims.num_heads,
            "D_c": dims.kv_lora_rank,
            "D_r": dims.qk_rope_head_dim,
            "H_i": dims.index_n_heads,
            "D_i": dims.index_head_dim,
            "K": dims.index_topk,
        }
        self._out_dtype = getattr(torch, DTYPE_NAMES[plan.problem.dtype])

    def _bind(self, plan: Plan) -> None:
        self.plan = plan
        self._workspace.reserve(plan.scratch_bytes)
        self._write: WriteKernel = _kernel(plan.write.row, plan)
        self._select: SelectKernel = _kernel(plan.select.row, plan)
        self._attend: AttendKernel = _kernel(plan.attend.row, plan)

    def warm_up(self) -> None:
        """Compile everything that a later call can need; required before graph capture.

        Index queries are expected in the cache's encoding or the activations' dtype, and caches to begin at a multiple of
        16 bytes with no gaps between blocks; others compile at their first use.

        Where ``auto`` chose a backend whose kernel does not compile on this device, a RuntimeWarning says so, and the next
        row of the table runs the stage: ``plan`` is then another one, with its scratch reserved. So too where strict mode
        was asked for and kernels do not agree to the bit here; where it was not, the stage stays, in fast mode.

        Raises:
            BackendRejectedError: a kernel cannot serve, and its backend was asked for by name or is the last.
        """
        for stage in Stage:
            while (fault := self._warm(stage)) is not None:
                failed = self.plan.stages[stage].row.name
                self._bind(self.plan.without(stage, fault))
                text = f'backend "{failed}" cannot run stage "{stage}": {fault}'
                warnings.warn(f"{text}; {self.plan.stages[stage].row.name} runs it", RuntimeWarning, stacklevel=2)

    def _warm(self, stage: Stage) -> Reason | None:
        kernels: dict[Stage, WriteKernel | SelectKernel | AttendKernel] = {
            Stage.WRITE: self._write,
            Stage.SELECT: self._select,
            Stage.ATTEND: self._attend,
        }
        try:
            kernels[stage].warm_up(self.device)
        except KernelError as error:
            if isinstance(error, StrictModeError) and not self.plan.problem.deterministic:
                self.plan = self.plan.fast(stage)
                warnings.warn(f'stage "{stage}" runs in fast mode: {error}', RuntimeWarning, stacklevel=3)
                return None
            return Reason(what=f"{error.what} on {self.plan.device.arch}", needs=str(error.needs), got=str(error.got))
        return None

    def write_latent(self, kv_c: torch.Tensor, k_pe: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        """Write latent rows into the cache, in place.

        Args:
            kv_c: ``[T, D_c] bf16|f16|f32``, normalised latents.
            k_pe: ``[T, D_r]`` of the same dtype, rotated keys.
            view: a view in the plan's latent format.
            slots: ``[N] i64`` with N <= T: row i goes to slot ``slots[i]``, and nowhere if that is negative; rows from
                N on are padding.

        Raises:
            ShapeError: a shape or dtype differs, or (on CPU) a slot is outside the cache.
            CacheFormatError: the view has another layout than the plan's.
        """
        dtype = self.plan.problem.dtype
        sizes = dict(self._sizes)
        bind(sizes, kv_c=(kv_c, f"[T, D_c] {dtype}"), k_pe=(k_pe, f"[T, D_r] {dtype}"), slots=(slots, "[N] i64"))
        _expect("latent cache", view, self.plan.problem.latent)
        kept = self._writable(sizes, slots, view)
        self._write.latent(kv_c[:kept], k_pe[:kept], view, slots)

    def write_index(self, index_k: torch.Tensor, view: CacheView, slots: torch.Tensor) -> None:
        """Write index keys into the cache, in place; ``index_k [T, D_i]``, the rest as in ``write_latent``."""
        sizes = dict(self._sizes)
        bind(sizes, index_k=(index_k, "[T, D_i] bf16|f16|f32"), slots=(slots, "[N] i64"))
        _expect("index cache", view, self.plan.problem.index)
        kept = self._writable(sizes, slots, view)
        self._write.index(index_k[:kept], view, slots)

    def select(
        self,
        index_q: torch.Tensor,
        index_weights: torch.Tensor,
        view: CacheView,
        batch: BatchLayout,
        out: torch.Tensor | None = None,
        lens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The ``index_topk`` best visible keys of each query token, exact, ties to the lower position.

        Args:
            index_q: ``[T, H_i, D_i]`` in the cache's fp8 encoding, or bf16|f16|f32.
            index_weights: ``[T, H_i] f32``; softmax, head and query scales are folded in.
            view: a view in the plan's index format.
            out: ``[T, K] i32`` to fill; rows ascend, then −1. Wider buffers are the caller's to slice.
            lens: ``[T] i32`` to fill with the number of indices of each row.

        Returns:
            ``out``.
        """
        sizes = dict(self._sizes) | {"T": batch.num_tokens}
        bind(
            sizes,
            index_q=(index_q, "[T, H_i, D_i] bf16|f16|f32|fp8|fp8fnuz"),
            index_weights=(index_weights, "[T, H_i] f32"),
        )
        rows, topk = sizes["T"], sizes["K"]
        out = torch.empty(rows, topk, dtype=torch.int32, device=index_q.device) if out is None else out
        lens = torch.empty(rows, dtype=torch.int32, device=index_q.device) if lens is None else lens
        bind(sizes, out=(out, "[T, K] i32"), lens=(lens, "[T] i32"))
        _expect("index cache", view, self.plan.problem.index)
        self._readable(batch, view)
        scratch = self._workspace.views(self.plan.select.buffers)
        self._select(index_q, index_weights, view, batch, out, lens, self.nan_rows, scratch)
        return out

    def attend(
        self,
        q: torch.Tensor,
        view: CacheView,
        indices: torch.Tensor,
        batch: BatchLayout,
        softmax_scale: float,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> AttentionOutput:
        """Attention of each query token over its selected rows; the value of a row is its first D_c entries.

        Args:
            q: ``[T, H, D_c + D_r]`` in the activations' dtype: absorbed and rotated parts.
            view: a view in the plan's latent format.
            indices: ``[T, K] i32`` positions in the token's own request, any order, −1 anywhere; duplicates count
                twice. Bits are promised for ascending order.
            softmax_scale: multiplies scores.
            out: ``[T, H, D_c]`` to fill.
        """
        dtype = self.plan.problem.dtype
        sizes = dict(self._sizes) | {"T": batch.num_tokens}
        bind(sizes, q=(q, f"[T, H, D_c+D_r] {dtype}"), indices=(indices, "[T, K] i32"))
        shape = (sizes["T"], sizes["H"], sizes["D_c"])
        out = torch.empty(shape, dtype=self._out_dtype, device=q.device) if out is None else out
        bind(sizes, out=(out, f"[T, H, D_c] {dtype}"))
        lse = torch.empty(shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        _expect("latent cache", view, self.plan.problem.latent)
        self._readable(batch, view)
        scratch = self._workspace.views(self.plan.attend.buffers)
        self._attend(q, view, indices, batch, softmax_scale, out, lse, scratch)
        return AttentionOutput(out, lse)

    def _writable(self, sizes: dict[str, int], slots: torch.Tensor, view: CacheView) -> int:
        if sizes["N"] > sizes["T"]:
            raise ShapeError("slots", needs=f"at most {sizes['T']} entries, one a row", got=sizes["N"])
        if slots.device.type == "cpu" and sizes["N"] and int(slots.max()) >= view.num_slots:
            raise ShapeError("slots", needs=f"slots below {view.num_slots}", got=int(slots.max()))
        return sizes["N"]

    def _readable(self, batch: BatchLayout, view: CacheView) -> None:
        problem = self.plan.problem
        for name, got, limit in (
            ("batch tokens", batch.num_tokens, problem.max_num_tokens),
            ("batch requests", batch.num_requests, problem.max_num_requests),
            ("longest request", batch.max_seq_len, problem.max_model_len),
            ("block table of the longest request, in tokens", batch.max_seq_len, _reach(batch, view)),
        ):
            if got > limit:
                raise ShapeError(name, needs=f"<= {limit}", got=got, hint="The plan promises bytes up to that.")


def _expect(name: str, view: CacheView, planned: CacheFormat) -> None:
    """Kernels and scratch were chosen for one layout of rows; the write rule is the view's own."""
    got = view.format
    if got is not planned and (got.name, got.fields, got.planar) != (planned.name, planned.fields, planned.planar):
        raise CacheFormatError(name, needs=f"the plan's {planned}", got=got)


def _reach(batch: BatchLayout, view: CacheView) -> int:
    return int(batch.block_table.shape[1]) * view.block_size


def _kernel(row: Row, plan: Plan) -> Any:
    module, _, name = row.path.partition(":")
    return getattr(import_module(module), name)(plan.problem, plan.device)
