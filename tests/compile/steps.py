"""Random legal calls as an engine makes them: slices of longer buffers, caches behind others in one allocation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparse_mla.batch import BatchLayout
from sparse_mla.cache import CacheFormat, CacheView
from sparse_mla.shapes import DTYPE_NAMES

if TYPE_CHECKING:
    import random

    from sparse_mla.attention import SparseMLA
    from sparse_mla.testing.geometries import Geometry


@dataclass
class Steps:
    """Steps of an engine on one lane. Values are zeros: which kernels start does not depend on them."""

    lane: SparseMLA
    geometry: Geometry
    rng: random.Random
    where: str = "cpu"

    def rows_within(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Rows as an engine hands them on: a slice of a longer buffer."""
        before, after = self.rng.choice((0, 1, 3)), self.rng.randint(0, 2)
        whole = torch.zeros(before + shape[0] + after, *shape[1:], dtype=dtype, device=self.where)
        return whole[before : before + shape[0]]

    def cache(self, cache_format: CacheFormat, blocks: int) -> CacheView:
        """A cache of an engine, behind other blocks of the same allocation."""
        before, block_size = self.rng.randint(0, 3) * 4, self.geometry.block_size
        block = block_size * cache_format.row_bytes
        return CacheView(
            storage=torch.zeros((before + blocks) * block, dtype=torch.uint8, device=self.where),
            format=cache_format,
            block_size=block_size,
            block_stride_bytes=block,
            num_blocks=blocks,
            offset_bytes=before * block,
        )

    def batch(self) -> BatchLayout:
        """Up to nine requests: decoding, prefilling, in between, and without a token."""
        rng = self.rng
        queries = [rng.choice((0, 1, 1, 1, 2, 15, 16, 17, 40, 90)) for _ in range(rng.randint(0, 9))]
        most = self.lane.plan.problem.max_model_len
        seqs = [min(most, query + rng.choice((0, 1, 16, 300, 4096, most))) for query in queries]
        width = max(-(-max(seqs, default=1) // self.geometry.block_size), 1) + rng.randint(0, 3)
        return BatchLayout(
            req_id_per_token=self.rows_within((sum(queries),), torch.int32),
            visible_lens=self.rows_within((sum(queries),), torch.int32),
            block_table=self.rows_within((len(queries), width), torch.int32),
            query_lens=tuple(queries),
            seq_lens=tuple(seqs),
        )

    def step(self) -> None:
        """Write, select and attend once."""
        rng, dims, dtype = self.rng, self.geometry.dims, getattr(torch, DTYPE_NAMES[self.geometry.dtype])
        batch, blocks = self.batch(), rng.choice((1, 2, 17, 33))
        tokens = batch.num_tokens
        latent, index = self.cache(self.geometry.latent, blocks), self.cache(self.geometry.index, blocks)
        slots = self.rows_within((rng.randint(0, tokens),), torch.int64)
        # Latents and rotated keys are halves of one projection, and sometimes tensors of their own.
        projected = self.rows_within((tokens, dims.head_dim), dtype)
        kv_c, k_pe = projected[:, : dims.kv_lora_rank], projected[:, dims.kv_lora_rank :]
        if rng.random() < 0.5:
            kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
        self.lane.write_latent(kv_c, k_pe, latent, slots)
        self.lane.write_index(self.rows_within((tokens, dims.index_head_dim), dtype), index, slots)
        asked = getattr(torch, DTYPE_NAMES[rng.choice((self.geometry.index.encoding, self.geometry.dtype))])
        index_q = self.rows_within((tokens, dims.index_n_heads, dims.index_head_dim), asked)
        weights = self.rows_within((tokens, dims.index_n_heads), torch.float32)
        indices, lens = (
            self.rows_within((tokens, dims.index_topk), torch.int32),
            self.rows_within((tokens,), torch.int32),
        )
        self.lane.select(index_q, weights, index, batch, indices, lens)
        q = self.rows_within((tokens, dims.num_heads, dims.head_dim), dtype)
        out = self.rows_within((tokens, dims.num_heads, dims.kv_lora_rank), dtype) if rng.random() < 0.5 else None
        scale = rng.choice((1, 0.0625))
        self.lane.attend(q, latent, indices, batch, scale, out, return_lse=rng.random() < 0.5)
