"""bench judges before it times: a wrong operator gets no figure, a right one gets one beside torch and the floor."""

from __future__ import annotations

import json
import sys

import pytest
import torch

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


class DeepGemm:
    """Stands for the vendor's module, which needs a GPU; ``fault`` is what it lacks: a rank that scores one key too low."""

    def __init__(self, fault):
        self.fault = fault

    def fp8_mqa_logits(self, query, keys, weights, begin, end):
        if self.fault == "raises":
            raise RuntimeError("Unsupported architecture")
        values, scale = keys
        product = torch.einsum("mhd,nd->mhn", query.float(), values.float()).relu_()
        scores = torch.einsum("mhn,mh->mn", product, weights) * scale
        hidden = torch.arange(len(scale)) >= end[:, None]
        scores.masked_fill_(hidden | (torch.arange(len(scale)) < begin[:, None]), -torch.inf)
        if self.fault == "wrong":
            scores.scatter_(1, scores.argmax(1, keepdim=True), -torch.inf)
        return scores


@pytest.mark.parametrize(
    ("fault", "words"), [(None, None), ("wrong", "selected"), ("raises", "RuntimeError: Unsupported architecture")]
)
def test_a_vendors_kernel_is_judged_before_it_is_timed(capsys, monkeypatch, fault, words):
    monkeypatch.setitem(sys.modules, "deep_gemm", DeepGemm(fault))
    code, result = answer(capsys)
    found = result["cases"][0]["peers"]["deep_gemm"]
    assert code == 0
    assert result["ok"]
    assert ("us" in found) == (fault is None)
    assert fault is None or words in found["failed"]
    assert main(["bench", "--only", SHAPE]) == 0
    shown = capsys.readouterr().out
    assert f"deep_gemm, {SHAPE}, 32 heads: " in shown
    assert fault is None or words in shown


class FlashMla:
    """Stands for the vendor's module, which needs a GPU."""

    def flash_mla_sparse_fwd(self, query, rows, indices, scale, rank):
        assert query.shape[1] % 64 == 0
        picked = rows[:, 0][indices[:, 0].long()].float()
        probability = (torch.einsum("thd,tkd->thk", query.float(), picked) * scale).softmax(-1)
        out = torch.einsum("thk,tkd->thd", probability, picked[..., :rank])
        return out.bfloat16(), None, None


def test_heads_are_padded_for_a_kernel_that_needs_64(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", FlashMla())
    assert main(["bench", "--json", "--only", "attend 8 x 4096"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["peers"]["flash_mla"]["us"] > 0


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
