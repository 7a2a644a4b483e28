from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.batch import BatchLayout
from sparse_mla.errors import ShapeError

REQUESTS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), max_size=6)


def build(requests, padding=0, blocks=4):
    queries, seqs = [query for query, _ in requests], [seq for _, seq in requests]
    table = torch.zeros(len(requests), blocks, dtype=torch.int32)
    return BatchLayout.build(
        query_lens=queries, seq_lens=seqs, block_table=table, num_tokens=sum(queries) + padding if padding else None
    )


@given(REQUESTS, st.integers(0, 5))
def test_the_causal_layout(requests, padding):
    batch = build(requests, padding)
    wanted = [
        (number, max(seq - query + token + 1, 0))
        for number, (query, seq) in enumerate(requests)
        for token in range(query)
    ] + [(-1, 0)] * padding
    got = list(zip(batch.req_id_per_token.tolist(), batch.visible_lens.tolist(), strict=True))
    assert got == wanted
    assert batch.num_tokens == len(wanted)
    assert batch.num_requests == len(requests)
    assert batch.max_query_len == max((query for query, _ in requests), default=0)
    assert batch.max_seq_len == max((seq for _, seq in requests), default=0)


@given(REQUESTS, st.integers(1, 12))
def test_chunks_cover_every_token_once_and_gather_once_a_request(requests, most):
    batch = build(requests, padding=2)
    chunks = list(batch.chunks(most))
    tokens = [token for chunk in chunks for token in range(chunk.start, chunk.stop)]
    assert tokens == list(range(sum(query for query, _ in requests)))
    for chunk in chunks:
        assert 1 <= chunk.stop - chunk.start <= most
        assert set(batch.req_id_per_token[chunk.start : chunk.stop].tolist()) == {chunk.request}
    gathered = [chunk.request for chunk in chunks if chunk.gather]
    assert gathered == [number for number, (query, _) in enumerate(requests) if query]
    firsts = {}
    for chunk in chunks:
        assert chunk.gather == (chunk.request not in firsts)
        firsts.setdefault(chunk.request, chunk)


@given(REQUESTS, st.data())
def test_a_subset_of_tokens_keeps_what_each_sees(requests, data):
    batch = build(requests)
    kept = sorted(data.draw(st.sets(st.integers(0, max(batch.num_tokens - 1, 0)), max_size=batch.num_tokens)))
    kept = kept if batch.num_tokens else []
    owners = batch.req_id_per_token[kept].tolist()
    counts = [owners.count(number) for number in range(len(requests))]
    part = batch.take(torch.tensor(kept, dtype=torch.int64), counts)
    assert part.visible_lens.tolist() == batch.visible_lens[kept].tolist()
    assert part.query_lens == tuple(counts)
    assert part.seq_lens == batch.seq_lens
    assert [chunk.request for chunk in part.chunks(100)] == sorted(set(owners))


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
@pytest.mark.parametrize("field", ["query_lens", "seq_lens"])
def test_lengths_outside_32_bits_are_refused_with_the_value(bad, field):
    lens = {"query_lens": [1, 1], "seq_lens": [5, 5], field: [1, bad]}
    with pytest.raises(ShapeError, match=f"{field}: needs lengths from 0 to 2147483647, got {bad}"):
        BatchLayout.build(**lens, block_table=torch.zeros(2, 1, dtype=torch.int32))


def test_the_longest_length_is_legal():
    batch = BatchLayout.build(query_lens=[2], seq_lens=[2**31 - 1], block_table=torch.zeros(1, 1, dtype=torch.int32))
    assert batch.visible_lens.tolist() == [2**31 - 2, 2**31 - 1]


def test_counts_that_disagree_are_refused():
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ShapeError, match="R = 1"):
        BatchLayout.build(query_lens=[1], seq_lens=[1], block_table=table)
    with pytest.raises(ShapeError, match="num_tokens: needs >= 5, got 4"):
        BatchLayout.build(query_lens=[2, 3], seq_lens=[2, 3], block_table=table, num_tokens=4)
    with pytest.raises(ShapeError, match="block_table has the wrong dtype"):
        BatchLayout.build(query_lens=[1, 1], seq_lens=[1, 1], block_table=table.long())
    with pytest.raises(ShapeError, match="block_table has the wrong rank"):
        BatchLayout.build(query_lens=[1, 1], seq_lens=[1, 1], block_table=table[0])
    good = build([(1, 1), (2, 5)])
    with pytest.raises(ShapeError, match="visible_lens"):
        replace(good, visible_lens=good.visible_lens[:-1])
    with pytest.raises(ShapeError, match="at most 3 tokens in all, got 4"):
        replace(good, query_lens=(2, 2))
    with pytest.raises(ShapeError, match="seq_lens: needs 2 requests, got 1"):
        replace(good, seq_lens=(1,))


def test_seq_lens_and_query_lens_of_unequal_number():
    with pytest.raises(ShapeError):
        BatchLayout.build(query_lens=[1, 2], seq_lens=[4], block_table=torch.zeros(2, 1, dtype=torch.int32))
