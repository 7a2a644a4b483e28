from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.doctor.expressions import Expression, ExpressionError


@pytest.mark.parametrize(
    ("text", "facts", "value"),
    [
        ("2 * chunk + 1", {"chunk": 8192}, 16385),
        ("logits_mb * 262144 // chunk + 1", {"logits_mb": 512, "chunk": 8192}, 16385),
        ("ceil(7, 2) + max(1, 2) - min(3, 4)", {}, 3),
        ("sm in (80, 86)", {"sm": 86}, True),
        ("sm not in (80, 86)", {"sm": 86}, False),
        ("arch == 'gfx942' and tp > 1", {"arch": "gfx942", "tp": 8}, True),
        ("-x < 0", {"x": 1}, True),
        ("x != 1", {"x": 1}, False),
        ("not x", {"x": 0}, True),
        ("x % 8 != 0", {"x": 11}, True),
    ],
)
def test_values(text, facts, value):
    assert Expression(text).value(facts) == value


@pytest.mark.parametrize(
    ("text", "facts", "value"),
    [
        ("a and b", {"a": False}, False),
        ("a and b", {"a": True}, None),
        ("a or b", {"b": True}, True),
        ("a or b", {"a": False}, None),
        ("not a", {}, None),
        ("a > 3", {"a": "text"}, None),
        ("a > 3", {"a": True}, None),
        ("a + 1", {}, None),
        ("1 // a", {"a": 0}, None),
        ("a * a", {"a": 1 << 63}, None),
        ("a in (1, 2)", {}, None),
        ("a == b", {"a": 1}, None),
    ],
)
def test_unknown_is_not_false(text, facts, value):
    assert Expression(text).holds(facts) is value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "a.b", "a[0]", "2 ** 99", "[a]", "lambda: 1", "f(1)", "min(a)", "max(a, b, key=c)", "1 < a < 3", "a is 1",
        "a in b", "a in (b, 1)", "'x' * 9 if a else b", "1.5", "1 << 70", "(a := 1)", "", "a b", "a" * 401, "9" * 80, "~a",
    ],
)  # fmt: skip
def test_outside_the_grammar(text):
    with pytest.raises(ExpressionError):
        Expression(text)


def test_names_leave_functions_out():
    assert Expression("max(a, 1) + b").names == {"a", "b"}


@given(
    st.text(alphabet="abc01 ()+-*/%<>=!,'.[]{}:@&|^~andorti\n\\\0", max_size=60),
    st.dictionaries(st.sampled_from("abc"), st.integers()),
)
def test_any_text_is_refused_or_evaluated(text, facts):
    try:
        expression = Expression(text)
    except ExpressionError:
        return
    expression.value(facts)
