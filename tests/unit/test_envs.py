from __future__ import annotations

import pytest

from sparse_mla import envs
from sparse_mla.errors import UsageError

GOOD = {
    "SPARSE_MLA_VLLM": [("off", "off"), ("fallback", "fallback"), ("always", "always")],
    "SPARSE_MLA_BACKEND": [("eager", "eager"), ("auto", "auto")],
    "SPARSE_MLA_DETERMINISTIC": [("0", False), ("1", True)],
    "SPARSE_MLA_SCRATCH_MIB": [("1", 1 << 20), ("1048576", 1 << 40), ("0512", 512 << 20)],
    "SPARSE_MLA_INDEX_KEYS": [("fp8", "fp8"), ("plain", "plain")],
    "SPARSE_MLA_TRACE": [("/a/folder", "/a/folder")],
    "SPARSE_MLA_CACHE_DIR": [("relative", "relative")],
}
BAD = {
    "SPARSE_MLA_VLLM": ["on", "OFF", " off", "1"],
    "SPARSE_MLA_INDEX_KEYS": ["bf16", "FP8"],
    "SPARSE_MLA_DETERMINISTIC": ["true", "2", "01", " 1"],
    "SPARSE_MLA_SCRATCH_MIB": ["0", "-1", "1.5", "1e3", "1048577", "٣", "0x10", "1 ", "9" * 400, "NaN"],
}


@pytest.mark.parametrize("variable", envs.VARIABLES, ids=lambda variable: variable.name)
def test_unset_and_empty_give_the_default(variable, monkeypatch):
    monkeypatch.delenv(variable.name, raising=False)
    assert envs.get(variable.name) == variable.default
    monkeypatch.setenv(variable.name, "")
    assert envs.get(variable.name) == variable.default


@pytest.mark.parametrize(("name", "text", "value"), [(n, t, v) for n, pairs in GOOD.items() for t, v in pairs])
def test_a_good_value_is_parsed_when_it_is_read(name, text, value, monkeypatch):
    monkeypatch.setenv(name, text)
    assert envs.get(name) == value
    monkeypatch.delenv(name)
    assert envs.get(name) == next(variable.default for variable in envs.VARIABLES if variable.name == name)


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, texts in BAD.items() for t in texts])
def test_a_bad_value_is_refused_with_name_value_and_cure(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError) as caught:
        envs.get(name)
    said = str(caught.value)
    assert name in said
    assert repr(text) in said
    assert "Unset it" in said
    assert "\n" not in said
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_every_variable_is_documented_and_tested():
    names = [variable.name for variable in envs.VARIABLES]
    assert len(set(names)) == len(names)
    assert set(GOOD) == set(names)
    for variable in envs.VARIABLES:
        assert variable.name.startswith("SPARSE_MLA_")
        assert len(variable.doc) > 40
        assert variable.doc.endswith(".")


def test_an_unknown_name_is_a_programming_error():
    with pytest.raises(KeyError):
        envs.get("SPARSE_MLA_NO_SUCH_THING")
