"""A scheduler step as vLLM states it becomes the BatchLayout that the operators read."""

from __future__ import annotations

import torch

from sparse_mla.batch import BatchLayout
from sparse_mla.integrations.vllm.layer_seams import Step, step_of
from sparse_mla.integrations.vllm.layout import layout


def step(query_lens: list[int], seq_lens: list[int], *, padding: int = 0, bound: list[int] | None = None) -> Step:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    total = sum(query_lens) + padding
    return Step(
        num_tokens=total,
        query_lens=query_lens,
        seq_lens_bound=seq_lens if bound is None else bound,
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(len(query_lens), 8, dtype=torch.int32),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
    )


def test_the_causal_layout_of_the_core():
    query_lens, seq_lens = [5, 1, 0, 7], [5, 40, 9, 23]
    got = layout(step(query_lens, seq_lens))
    wanted = BatchLayout.build(query_lens=query_lens, seq_lens=seq_lens, block_table=got.block_table)
    assert torch.equal(got.req_id_per_token, wanted.req_id_per_token)
    assert torch.equal(got.visible_lens, wanted.visible_lens)
    assert (got.query_lens, got.seq_lens) == (wanted.query_lens, wanted.seq_lens)


def test_padding_tokens_belong_to_nobody_and_see_nothing():
    got = layout(step([2, 1], [2, 4], padding=3))
    assert got.req_id_per_token.tolist() == [0, 0, 1, -1, -1, -1]
    assert got.visible_lens.tolist() == [1, 2, 4, 0, 0, 0]


def test_the_devices_lengths_decide_where_the_hosts_are_bounds():
    got = layout(step([1, 1], [7, 9], bound=[9, 9]))
    assert got.visible_lens.tolist() == [7, 9]
    assert got.seq_lens == (9, 9)


def test_a_request_shorter_than_its_queries_sees_nothing_at_first():
    assert layout(step([3], [1])).visible_lens.tolist() == [0, 0, 1]


def test_an_empty_step():
    got = layout(step([], []))
    assert (got.num_tokens, got.num_requests) == (0, 0)


class Common:
    """The fields of vLLM's CommonAttentionMetadata, padded as for a captured graph."""

    num_reqs = 2
    num_actual_tokens = 6
    query_start_loc = query_start_loc_cpu = torch.tensor([0, 5, 6, 6], dtype=torch.int32)
    seq_lens = torch.tensor([5, 8, 0], dtype=torch.int32)
    seq_lens_cpu_upper_bound = torch.tensor([5, 8, 0], dtype=torch.int32)
    block_table_tensor = torch.arange(12, dtype=torch.int32).view(3, 4)
    slot_mapping = torch.arange(9)


def test_what_vllm_says_is_cut_to_the_real_requests():
    got = step_of(Common)
    assert (got.num_tokens, got.query_lens, got.seq_lens_bound) == (6, [5, 1], [5, 8])
    assert got.query_start_loc.tolist() == [0, 5, 6]
    assert got.seq_lens.tolist() == [5, 8]
    assert got.block_table.shape == (2, 4)
    assert got.slot_mapping.numel() == 6


def test_without_host_lengths_the_device_is_asked():
    class Older(Common):
        seq_lens_cpu_upper_bound = None

    assert step_of(Older).seq_lens_bound == [5, 8]
