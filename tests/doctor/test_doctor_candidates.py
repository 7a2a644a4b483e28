from __future__ import annotations

import pytest

from sparse_mla.device import KNOWN
from sparse_mla.doctor import child
from sparse_mla.doctor.candidates import DEPENDS, INVALID, UNREADABLE, VALID, Request, read
from sparse_mla.doctor.reading import Reader
from sparse_mla.doctor.values import Choices, Method, Raised, Symbol, Unknown, Unreadable, explore
from sparse_mla.engine_source import tree as source

MODEL = {"index_topk": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192}


INSTALLED = source.installed()


def offers(arch, **more):
    return read(INSTALLED, Request(arch=arch, model=MODEL, num_heads=16, **more))


def statuses(found):
    return {offer.name: offer.status for offer in found.backends if not offer.dense}


@pytest.mark.parametrize("arch", KNOWN)
def test_every_architecture_gets_an_answer(arch):
    found = offers(arch)
    assert found.backends
    assert all(offer.status != UNREADABLE for offer in found.backends)
    assert "not run" in found.how


# What vLLM 0.32.0 says of itself.
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm89"])
def test_older_nvidia_has_none(arch):
    found = offers(arch)
    assert found.usable == ()
    assert set(statuses(found).values()) == {INVALID}
    assert found.refusal.blocking == ("compute capability not supported",)
    assert "DeepGEMM" in " ".join(found.notes)


def test_hopper():
    found = offers("sm90")
    assert statuses(found) == {
        "FLASH_ATTN_MLA_SPARSE": DEPENDS,
        "FLASHMLA_SPARSE": VALID,
        "FLASHINFER_MLA_SPARSE_SM90": DEPENDS,
    }
    assert found.refusal is None
    assert found.indexer.conditions == ("not has_deep_gemm()",)


def test_blackwell_order_follows_heads_and_dtype():
    assert offers("sm100").usable == ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE")
    many = read(INSTALLED, Request(arch="sm100", model=MODEL, num_heads=128))
    assert many.usable == ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE")
    assert offers("sm103", kv_cache_dtype="fp8_ds_mla").usable == ("FLASHMLA_SPARSE",)


def test_consumer_blackwell_depends_on_flashinfer():
    found = offers("sm120")
    assert statuses(found) == {"FLASHINFER_MLA_SPARSE_SM120": DEPENDS}
    assert next(o for o in found.backends if not o.dense).conditions == ("not has_flashinfer_sparse_mla_sm120()",)
    other = read(INSTALLED, Request(arch="sm120", model={**MODEL, "index_topk": 1024}))
    assert any("2048" in reason for offer in other.backends for reason in offer.reasons)


def test_rocm_has_one_and_the_indexer_its_own_list():
    for arch in ("gfx942", "gfx950", "gfx1100", "gfx1201"):
        assert offers(arch).usable == ("ROCM_AITER_MLA_SPARSE",)
    assert offers("gfx950").indexer.status == VALID
    assert offers("gfx1100").indexer.status == VALID
    assert offers("gfx942").indexer.status == DEPENDS
    assert offers("gfx1201").indexer.status == DEPENDS
    assert offers("gfx942", kv_cache_dtype="fp8_ds_mla").usable == ()


def test_cpu_refuses_in_its_own_words():
    found = offers("cpu")
    assert [(o.status, o.reasons) for o in found.backends] == [
        (INVALID, ("Sparse Attention is not supported on CPU.",))
    ]
    assert found.refusal is None


def test_settings_that_block_are_told_from_devices():
    found = offers("sm90", kv_cache_dtype="fp8_e5m2")
    assert found.refusal.adjustable
    assert found.refusal.blocking == ("kv_cache_dtype not supported",)
    assert not offers("sm80", kv_cache_dtype="fp8_e5m2").refusal.adjustable
    assert "block_size not supported" in offers("sm90", block_size=24).refusal.blocking


def test_tree_that_cannot_be_read(tree):
    opened = source.given(tree({"platforms/cuda.py": "def (", "platforms/rocm.py": "x = 1"}))
    assert read(opened, Request(arch="sm90")).notes
    assert read(opened, Request(arch="gfx942")).backends == ()
    assert read(opened, Request(arch="cpu")).notes


def test_backend_that_is_not_there(tree):
    opened = source.given(
        tree({
            "platforms/rocm.py": "from vllm.v1.attention.backends.registry import AttentionBackendEnum\n"
            "def _get_backend_priorities(use_mla, use_sparse):\n    return [AttentionBackendEnum.GONE]\n",
            "v1/attention/backends/registry.py": "from enum import Enum\nclass AttentionBackendEnum(Enum):\n    GONE = 'vllm.gone.Gone'\n",
        })
    )  # fmt: skip
    assert [(o.name, o.status) for o in read(opened, Request(arch="gfx942")).backends] == [("GONE", UNREADABLE)]


def run(tree, text, known=None, **arguments):
    """All outcomes of ``f`` in a module with ``text``."""
    opened = source.given(tree({"m.py": text}))
    method = Method("m.py", opened.function("m.py", "f"), None)

    def once(choices):
        try:
            return Reader(opened, choices, known or {}).call(method, arguments)
        except (Raised, Unreadable) as error:
            return error

    return [outcome.result for outcome in explore(once)]


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("def f(a):\n    return a + 1 if a > 2 else [a, *[1, 2]]", [[2, 1, 2]]),
        ("def f(a):\n    x = []\n    for i in [1, 2, 3]:\n        if i != a:\n            x.append(i)\n    return x", [[1, 3]]),
        ("def f(a):\n    return 'fp8_x'.startswith('fp8') and not a == 3", [True]),
        ("def f(a):\n    return any(i == a for i in (1, 2)), all(i == a for i in (1, 2))", [(True, False)]),
        ("def f(a):\n    if outside():\n        return 1\n    return 2", [1, 2]),
        ("def f(a):\n    if outside() and a == 3:\n        return 1\n    return 2", [2]),
        ("def f(a):\n    if outside() or a == 2:\n        return 1\n    return 2", [1]),
        ("def f(a):\n    if outside():\n        x = 1\n    else:\n        x = 0\n    return x if not outside() else 5", [5, 0]),
        ("def g(b, c=4):\n    return b * c\ndef f(a):\n    return g(a, c=3) + g(b=1)", [10]),
        ("K = 7\nclass C:\n    size = [1, K]\n    @classmethod\n    def m(cls):\n        return cls.size\nclass D(C):\n    pass\ndef f(a):\n    return D.m()", [[1, 7]]),
        ("def f(a):\n    try:\n        raise ValueError('x')\n    except ValueError:\n        return 3", [3]),
        ("def f(a):\n    return f'{a}-{outside()}'", ["2-{outside()}"]),
        ("def f(a):\n    return getattr(a, 'x', 3)", [Unknown("getattr(a, 'x', 3)")]),
        ("def f(a, *, k=5):\n    return min(a, k), len('abc'), int('4')", [(2, 3, 4)]),
        ("def f(a):\n    return a in (1, 2), None is None, a is None, -a", [(True, True, False, -2)]),
    ],
)  # fmt: skip
def test_reader_follows_plain_python(tree, text, results):
    assert run(tree, text, a=2) == results


@pytest.mark.parametrize(
    "text",
    [
        "def f(a):\n    while True:\n        pass",
        "def f(a):\n    return f(a)",
        "def f(a):\n    with a:\n        pass",
        "def f(a):\n    a, b = 1, 2",
        "def f(a):\n    for i in outside():\n        pass",
        "def f(a):\n    x = [1]\n    for i in x:\n        for j in [0] * 250:\n            for k in [0] * 250:\n                x.count(1)",
        "def f(a):\n    return [*outside()]",
    ],
)
def test_reader_stops_where_it_must(tree, text):
    result = run(tree, text, a=2)
    assert all(isinstance(item, (Unreadable, Unknown)) for item in result)


def test_reader_runs_nothing(tree, tmp_path):
    marker = tmp_path / "ran"
    text = f"import os\nos.system('touch {marker}')\nfrom vllm.n import g\ndef f(a):\n    os.system('touch {marker}')\n    __import__('os').remove('x')\n    open('{marker}', 'w')\n    eval('1')\n    exec('1')\n    return a"
    assert run(tree, text, a=2) == [2]
    assert not marker.exists()


def test_raise_carries_the_message(tree):
    (result,) = run(tree, "def f(a):\n    raise RuntimeError(f'needs {a}')", a=2)
    assert result.text == "needs 2"


def test_unknown_conditions_are_bounded(tree):
    text = "def f(a):\n" + "".join(f"    if c{i}():\n        a = {i}\n" for i in range(30)) + "    return a"
    assert 1 < len(run(tree, text, a=2)) <= 64


def test_known_names_win(tree):
    text = "from vllm.platforms import current_platform\ndef f(a):\n    return current_platform.is_cuda()"
    known = {"vllm.platforms.current_platform": Symbol("p"), "p.is_cuda": lambda: True}
    assert run(tree, text, known, a=2) == [True]


def test_choices_stay_the_same_within_a_run():
    choices = Choices((False,))
    assert [choices.decide("x"), choices.decide("x"), choices.decide("y")] == [False, False, True]


class TestChild:
    REQUEST = Request(arch="sm80", model=MODEL, num_heads=16)

    def answered(self, monkeypatch, tmp_path, code):
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\n{code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(child.sys, "executable", str(script))
        return child.ask(self.REQUEST, offers("sm80"), seconds=1)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("sleep 30", "longer than"),
            ("echo boom >&2; exit 3", "exit code 3, boom"),
            ("kill -SEGV $$", "exit code"),
            ("echo 'SPARSE-MLA-ANSWER {'", "not JSON"),
            ("echo 'SPARSE-MLA-ANSWER []'", "empty"),
            ("echo 'SPARSE-MLA-ANSWER [3]'", "empty"),
            ("exit 0", "no message"),
        ],
    )
    def test_broken_engine_is_read_instead(self, monkeypatch, tmp_path, code, said):
        found = self.answered(monkeypatch, tmp_path, code)
        assert said in found.notes[-1]
        assert statuses(found) == statuses(offers("sm80"))
        assert "not run" in found.how

    def test_answers_are_taken_but_not_what_the_build_lacks(self, monkeypatch, tmp_path):
        answer = (
            '[{"name": "FLASHMLA_SPARSE", "reasons": ["from the child"], "failed": ""},'
            ' {"name": "FLASH_ATTN_MLA_SPARSE", "reasons": [], "failed": "ImportError: kernels"},'
            ' {"name": "NEW_SPARSE", "reasons": [], "failed": ""}]'
        )
        found = self.answered(monkeypatch, tmp_path, f"echo 'noise'; echo 'SPARSE-MLA-ANSWER {answer}'")
        assert "run in a child" in found.how
        assert "1 of 3" in found.how
        told = {offer.name: (offer.status, offer.reasons) for offer in found.backends}
        assert told == {
            "FLASHMLA_SPARSE": (INVALID, ("from the child",)),
            "FLASH_ATTN_MLA_SPARSE": (INVALID, ("compute capability not supported",)),
            "NEW_SPARSE": (VALID, ()),
        }

    def test_missing_interpreter(self, monkeypatch):
        monkeypatch.setattr(child.sys, "executable", "/no/such/python")
        assert "FileNotFoundError" in child.ask(self.REQUEST, offers("sm80")).notes[-1]

    @pytest.mark.engine
    def test_the_engine_itself_agrees_with_the_reading(self):
        """vLLM's own code, run with a fake capability, against what reading it said."""
        for arch in ("sm80", "gfx950"):
            stated = offers(arch)
            found = child.ask(Request(arch=arch, model=MODEL, num_heads=16), stated)
            assert "run in a child" in found.how, found.notes
            assert statuses(found) == statuses(stated)
