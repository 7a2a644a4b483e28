"""Two worker processes serve one model: both select the same tokens, and the logprobs are those of one."""

from __future__ import annotations

import random

import pytest

from sparse_mla.integrations.vllm import trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LENGTH = 700  # eleven times index_topk, and six chunks
CHUNK = 128
TOLERANCE = 1e-3
NEAR_TIES = 0.01
"""Of all rows, at most. Two ranks add their parts of a sum in another order, and where two scores around the k-th lie
within rounding that is another selection. Index keys are plain, because fp8 makes many such rows of few."""


@pytest.fixture(scope="module")
def served(run_jobs, tiny, tmp_path_factory):
    """Answers of one rank and of two, and the traces of each worker process."""
    source = random.Random(0)
    prompt = [source.randrange(2, 512) for _ in range(LENGTH)]
    folder = tmp_path_factory.mktemp("ranks")
    jobs = [
        {
            "model": str(tiny),
            "engine": {"max_num_batched_tokens": CHUNK, "tensor_parallel_size": ranks},
            "batches": [[prompt]],
            "tokens": 4,
            "env": {"SPARSE_MLA_TRACE": str(folder / str(ranks))},
        }
        for ranks in (1, 2)
    ]
    results, _ = run_jobs(jobs, VLLM_CPU_OMP_THREADS_BIND="0|1", SPARSE_MLA_INDEX_KEYS="plain")
    return [answer(result) for result in results], [by_process(folder / str(ranks)) for ranks in (1, 2)]


def answer(result):
    assert "error" not in result, result
    return result["batches"][0][0]


def by_process(folder):
    """(layer, stage) -> position -> digest, of each worker process."""
    found = []
    for number, file in enumerate(sorted(folder.glob("*.jsonl"))):
        alone = folder / str(number)
        alone.mkdir()
        file.rename(alone / file.name)
        found.append({(layer, stage): rows for (_, layer, stage), rows in trace.load(alone).items()})
    return found


def test_two_ranks_give_the_logprobs_of_one(served):
    (one, two), ((single,), (rank, _)) = served
    selected = [key for key in single if key[1] == "selected"]
    assert len(selected) == 3
    other = {row for key in selected for row in range(LENGTH) if single[key][row] != rank[key][row]}
    assert len(other) <= NEAR_TIES * LENGTH
    moves = [abs(a - b) for a, b in zip(one["prompt_logprobs"], two["prompt_logprobs"], strict=True)]
    assert max(move for row, move in enumerate(moves) if row not in other) < TOLERANCE
    assert max(moves) > 0  # else one of the two was not what it says
    assert one["tokens"] == two["tokens"]


def test_both_ranks_write_and_select_the_same(served):
    """Index heads are replicated: ranks that select differently would add up parts of different answers."""
    _, (_, (first, second)) = served
    for stage in ("index_cache", "latent_cache", "selected"):
        layers = [key for key in first if key[1] == stage]
        assert len(layers) == 3
        assert all(first[key] == second[key] for key in layers), stage
        assert all(sorted(first[key]) == list(range(LENGTH + 3)) for key in layers)
    assert all(first[key] != second[key] for key in first if key[1] == "output")  # each has heads of its own
