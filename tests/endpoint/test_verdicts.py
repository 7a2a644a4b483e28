from __future__ import annotations

import pytest

from sparse_mla.errors import UsageError
from sparse_mla.verify.endpoint.outcome import Outcome, Probe
from sparse_mla.verify.endpoint.sweep import Trial, lengths_to_ask, planned
from sparse_mla.verify.endpoint.verdicts import (
    Edge,
    chunk_of,
    compare_edges,
    modulo_verdict,
    ordinal,
    position_verdict,
)


def outcome(*found: bool, length: int = 10_000, invented: int = 0) -> Outcome:
    """Facts evenly spread over the prompt; with ten, the last stands in the last tenth."""
    facts = tuple((f"at {place}", place * length // len(found), one) for place, one in enumerate(found))
    return Outcome(prompt_tokens=length, counted=True, facts=facts, invented=invented)


def trial(*outcomes: Outcome, least: float = 1.0) -> Trial:
    return Trial(probe=Probe(state="cold", length=10_000), outcomes=outcomes, least=least)


ALL = outcome(*[True] * 10)
NONE = outcome(*[False] * 10)


def test_set_equality_decides_lost_and_invented_values_alike():
    assert ALL.passes(1.0)
    assert not outcome(*[True] * 9, False).passes(1.0)
    assert not outcome(*[True] * 10, invented=1).passes(1.0)
    assert outcome(*[True] * 9, False, invented=1).passes(0.9)
    assert not outcome(*[True] * 8, False, False).passes(0.9)
    assert not Outcome(failure="timeout").passes(0.1)


@pytest.mark.parametrize(
    ("outcomes", "ok", "fails", "intermittent", "answered"),
    [
        ((ALL,), True, False, False, True),
        ((NONE, NONE, NONE), False, True, False, True),
        ((NONE, NONE, ALL), False, True, False, True),
        ((NONE, ALL, ALL), False, False, True, True),
        ((NONE, Outcome(failure="timeout"), Outcome(failure="timeout")), False, True, False, True),
        ((Outcome(failure="timeout"),), False, False, False, False),
    ],
)
def test_a_trial_is_what_most_of_its_attempts_say(outcomes, ok, fails, intermittent, answered):
    one = trial(*outcomes)
    assert (one.ok, one.fails, one.intermittent, one.answered) == (ok, fails, intermittent, answered)


def test_positions():
    assert position_verdict(trial(outcome(*[False] * 9, True)), 1024).id == "endpoint.last-topk"
    assert position_verdict(trial(NONE), 1024).id == "endpoint.garbled"
    assert position_verdict(trial(outcome(True, *[False] * 9)), 1024).id == "endpoint.depth"
    # a lost fact inside the last index_topk tokens is no selection of the newest
    assert position_verdict(trial(outcome(*[False] * 8, False, True)), 2048).id == "endpoint.depth"
    # and without a fact before them nothing was selected away
    assert position_verdict(trial(outcome(*[True] * 9, False)), 20_000).id == "endpoint.depth"


@pytest.mark.parametrize(
    ("failing", "verdict", "words"),
    [
        ({3}, "endpoint.length-modulo", "3 modulo 4"),
        ({1, 3, 5}, "endpoint.length-modulo", "1 modulo 2"),
        ({0, 3, 6}, "endpoint.length-modulo", "0 modulo 3"),
        ({0, 1, 4, 5}, "endpoint.length-modulo", "0 or 1 modulo 4"),
        ({0, 1, 5, 6}, "endpoint.length-modulo", "0 or 1 modulo 5"),
        ({0, 1, 3}, "endpoint.irregular", "without a pattern"),
    ],
)
def test_lengths_that_fail_in_turn(failing, verdict, words):
    found = modulo_verdict({60_000 + near: near in failing for near in range(7)})
    assert found is not None
    assert found.id == verdict
    assert words in found.statement
    assert found.excludes


@pytest.mark.parametrize("first", [0, 1, 6, 7])
def test_one_threshold_is_no_pattern(first):
    assert modulo_verdict({60_000 + near: near >= first for near in range(7)}) is None


def test_chunks_that_begin_inside_an_edge():
    assert chunk_of(Edge(passes=16_380, fails=16_400), 8192, 0) == 3
    assert chunk_of(Edge(passes=16_384, fails=16_385), 8192, 0) == 3
    assert chunk_of(Edge(passes=16_385, fails=16_400), 8192, 0) is None
    assert chunk_of(Edge(passes=1000, fails=2000), 8192, 0) is None
    assert chunk_of(Edge(passes=1000, fails=2000), None, 0) is None


def test_a_chunk_of_a_few_tokens_may_still_pass():
    edge = Edge(passes=6_163, fails=6_218)
    assert chunk_of(edge, 3072, 64) == 3
    assert ordinal(edge, 3072, 64) == ", just after the third chunk of 3,072 tokens begins"
    assert chunk_of(edge, 3072, 18) is None
    assert chunk_of(Edge(passes=6_220, fails=6_240), 100, 64) is None  # everything lies near a boundary of small chunks
    found = compare_edges(Edge(passes=4_092, fails=4_131), edge, (2048, 3072), 64)
    assert found.id == "endpoint.chunk-count"
    assert "where the third chunk of 2,048" in found.evidence[0]


def test_two_endpoints_tell_chunks_from_length():
    third = compare_edges(Edge(passes=16_380, fails=16_400), Edge(passes=24_570, fails=24_600), (8192, 12_288), 64)
    assert third.id == "endpoint.chunk-count"
    assert "third chunk" in third.statement
    assert "total length" in third.excludes[0]
    same = compare_edges(Edge(passes=20_000, fails=20_064), Edge(passes=20_030, fails=20_090), (8192, 12_288), 64)
    assert same.id == "endpoint.length"
    assert "chunks" in same.excludes[0]
    other = compare_edges(Edge(passes=16_380, fails=16_400), Edge(passes=30_000, fails=30_064), (8192, 12_288), 64)
    assert other.id == "endpoint.server"
    unknown = compare_edges(Edge(passes=16_380, fails=16_400), Edge(passes=24_570, fails=24_600), (8192, None), 64)
    assert unknown.id == "endpoint.server"
    assert "--chunk-tokens" in unknown.leaves_open[0]


def test_lengths_follow_the_limit_that_the_server_tells():
    assert lengths_to_ask(None, None, 400)[-1] == 100_000
    assert lengths_to_ask(None, 131_072, 400) == (20_000, 40_000, 60_000, 80_000, 100_000)
    assert lengths_to_ask(None, 65_536, 400) == (20_000, 40_000, 65_136)
    assert lengths_to_ask(None, 8192, 400) == (3896, 7792)
    assert lengths_to_ask((5, 3, 5), 8192, 400) == (3, 5)
    with pytest.raises(UsageError, match=r"--lengths: needs at most 7,792.*got 9,000"):
        lengths_to_ask((9000,), 8192, 400)


def test_the_plan_has_every_residue_modulo_four_and_a_short_sparse_length():
    plan = planned((20_000, 40_000, 60_000), index_topk=2048, least=300, beside=4)
    assert plan[0] == Probe(state="cold", length=4096)
    for state in ("prefix", "concurrent"):
        assert {probe.length % 4 for probe in plan if probe.state == state} == {1, 2, 3}
    assert not [
        probe for probe in planned((20_000,), index_topk=2048, least=300, beside=0) if probe.state == "concurrent"
    ]
    assert planned((4000,), index_topk=2048, least=300, beside=1)[0].length == 4000
