"""bench judges before it times: a wrong operator gets no figure, a right one gets one beside torch and the floor."""

from __future__ import annotations

import json
import sys

import pytest

from sparse_mla.backends.eager import select
from sparse_mla.cli.main import main

SHAPE = "select 8 x 4096"


def answer(capsys, *flags):
    code = main(["bench", "--json", "--only", SHAPE, *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_right_operator_is_timed(capsys):
    code, result = answer(capsys)
    (case,) = result["cases"]
    assert (code, result["ok"], result["schema"]) == (0, True, "sparse-mla/bench/1")
    assert case["us"] > case["floor_us"] > 0
    assert case["torch_us"] > 0
    assert case["torch_bytes"] > 0
    assert (case["backend"], case["mode"]) == ("eager", "strict")


def test_a_wrong_operator_gets_no_figure(capsys, monkeypatch):
    right = select.pick

    def last_ones_win(scores, topk):
        picked, only_nan = right(scores.flip(0), topk)
        return picked, only_nan

    monkeypatch.setattr(select, "pick", last_ones_win)
    code, result = answer(capsys)
    (case,) = result["cases"]
    assert (code, result["ok"]) == (1, False)
    assert "selected" in case["evidence"]
    assert "us" not in case


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device", "gpu"), "needs cpu, cuda or cuda:N"),
        (("--only", "no such shape"), "--only: needs part of: select 1 x 1 x 4096"),
        (("--only", SHAPE, "--backend", "nobody"), "unknown backend"),
    ],
)
def test_bad_options_are_one_line(capsys, flags, words):
    assert main(["bench", *flags]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_without_torch_nothing_is_checked(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench"]) == 3
    assert "pip install" in capsys.readouterr().err
