"""BatchLayout: which tokens a call holds, what each may see, and where the cache rows of its requests are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .errors import ShapeError
from .shapes import bind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

_MAX_LEN = 2**31 - 1


class Chunk(NamedTuple):
    """Rows ``[start, stop)`` of a batch, all of one request; ``gather`` on the request's first chunk only."""

    request: int
    start: int
    stop: int
    gather: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """A ragged batch of T query tokens of R requests; tokens of one request follow each other.

    The device tensors decide what is computed; the host ints are upper bounds, for cutting work without waiting for
    the device. A query token sees the first ``visible_lens`` tokens of its request: a position test, nothing else.

    Attributes:
        req_id_per_token: ``[T] i32``, the row of ``block_table``; −1 marks a padding token.
        visible_lens: ``[T] i32``, 0 for a token that sees nothing.
        block_table: ``[R, B] i32``, physical blocks of each request; entries past its length may hold anything.
        query_lens: tokens of each request in this call, host.
        seq_lens: tokens of each request in the cache, this call's included, host upper bound.
    """

    req_id_per_token: torch.Tensor
    visible_lens: torch.Tensor
    block_table: torch.Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {"R": len(self.query_lens)}
        bind(
            sizes,
            req_id_per_token=(self.req_id_per_token, "[T] i32"),
            visible_lens=(self.visible_lens, "[T] i32"),
            block_table=(self.block_table, "[R, B] i32"),
        )
        if len(self.seq_lens) != sizes["R"]:
            raise ShapeError("seq_lens", needs=f"{sizes['R']} requests", got=len(self.seq_lens))
        if sum(self.query_lens) > sizes["T"]:
            raise ShapeError("query_lens", needs=f"at most {sizes['T']} tokens in all", got=sum(self.query_lens))

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        num_tokens: int | None = None,
    ) -> BatchLayout:
        """The causal layout: token i of a request sees ``seq_len − query_len + i + 1`` tokens, and never less than 0.

        Args:
            query_lens: tokens of each request in this call, >= 0.
            seq_lens: tokens of each request in the cache once this call's are written.
            block_table: ``[R, B] i32`` on the device where the batch runs.
            num_tokens: T with padding tokens at the end; default ``sum(query_lens)``.
        """
        import torch

        queries, seqs = tuple(map(int, query_lens)), tuple(map(int, seq_lens))
        for name, lens in (("query_lens", queries), ("seq_lens", seqs)):
            bad = [length for length in lens if not 0 <= length <= _MAX_LEN]
            if bad:
                raise ShapeError(name, needs=f"lengths from 0 to {_MAX_LEN}", got=bad[0])
        total = sum(queries)
        padding = 0 if num_tokens is None else num_tokens - total
        if padding < 0:
            raise ShapeError("num_tokens", needs=f">= {total}", got=num_tokens)
        counts = torch.tensor(queries, dtype=torch.int64)
        request = torch.repeat_interleave(torch.arange(len(queries)), counts)
        start = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        past = torch.repeat_interleave(torch.tensor(seqs, dtype=torch.int64) - counts, counts)
        visible = (past + torch.arange(total) - start + 1).clamp_(min=0)
        request = torch.nn.functional.pad(request, (0, padding), value=-1)
        visible = torch.nn.functional.pad(visible, (0, padding), value=0)
        return cls(
            req_id_per_token=request.to(block_table.device, torch.int32),
            visible_lens=visible.to(block_table.device, torch.int32),
            block_table=block_table,
            query_lens=queries,
            seq_lens=seqs,
        )

    @property
    def num_tokens(self) -> int:
        """T, padding tokens included."""
        return int(self.req_id_per_token.shape[0])

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """Most query tokens of a request."""
        return max(self.query_lens, default=0)

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest request, host upper bound."""
        return max(self.seq_lens, default=0)

    def chunks(self, most: int) -> Iterator[Chunk]:
        """Cut the batch into runs of at most ``most`` rows, each of one request. Host ints only."""
        start = 0
        for request, query_len in enumerate(self.query_lens):
            for first in range(0, query_len, most):
                stop = min(first + most, query_len)
                yield Chunk(request=request, start=start + first, stop=start + stop, gather=first == 0)
            start += query_len

    def take(self, tokens: torch.Tensor, query_lens: Sequence[int]) -> BatchLayout:
        """The same requests with a subset of their query tokens.

        Args:
            tokens: ``[N] i64`` ascending token numbers of this batch.
            query_lens: how many of them each request keeps.
        """
        return replace(
            self,
            req_id_per_token=self.req_id_per_token[tokens],
            visible_lens=self.visible_lens[tokens],
            query_lens=tuple(query_lens),
        )
