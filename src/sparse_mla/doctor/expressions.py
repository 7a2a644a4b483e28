"""The expressions in knowledge-base entries: integers, strings, facts by name, + - * // % and comparisons, no calls but
min, max and ceil. A fact that nobody knows makes the result unknown (None), never false.
"""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Fact = int | float | str | bool | None

_MAX_LENGTH = 400
_MAX_NUMBER = 1 << 62


def _ceil(numerator: int | float, denominator: int | float) -> int | float:
    return -(-numerator // denominator)


_ARITHMETIC: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "ceil": _ceil}


class ExpressionError(ValueError):
    """A knowledge-base expression uses something outside the grammar."""


class Expression:
    """One parsed expression; ``names`` are the facts it reads.

    Raises:
        ExpressionError: too long, not parseable, or outside the grammar.
    """

    __slots__ = ("_evaluate", "names", "text")

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        if len(text) > _MAX_LENGTH:
            raise ExpressionError(f"expression of {len(text)} characters, at most {_MAX_LENGTH}")
        try:
            tree = ast.parse(self.text, mode="eval").body
            self._evaluate = _compile(tree)
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ExpressionError(f"{text!r}: {error}") from None
        called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
        self.names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in called)

    def value(self, facts: Mapping[str, Fact]) -> Fact:
        """The value under ``facts``; None when a fact it needs is missing, of the wrong kind, or out of range."""
        return self._evaluate(facts)

    def holds(self, facts: Mapping[str, Fact]) -> bool | None:
        """True, False, or None for unknown."""
        value = self.value(facts)
        return None if value is None else bool(value)


if TYPE_CHECKING:
    Evaluate = Callable[[Mapping[str, Fact]], Fact]


def _compile(node: ast.expr) -> Evaluate:
    compiler = _COMPILERS.get(type(node))
    if compiler is None:
        raise ExpressionError(f"{ast.unparse(node)!r} is outside the grammar")
    return compiler(node)


def _constant(node: ast.Constant) -> Evaluate:
    value = node.value
    if not isinstance(value, (bool, int, str)) or (isinstance(value, int) and abs(value) > _MAX_NUMBER):
        raise ExpressionError(f"{value!r} is outside the grammar")
    return lambda _: value


def _name(node: ast.Name) -> Evaluate:
    return lambda facts: facts.get(node.id)


def _logic(node: ast.BoolOp) -> Evaluate:
    """Kleene logic: a decided operand decides, whatever stays unknown beside it."""
    decisive = isinstance(node.op, ast.Or)
    children = [_compile(child) for child in node.values]

    def evaluate(facts: Mapping[str, Fact]) -> Fact:
        values = [child(facts) for child in children]
        if any(value is not None and bool(value) is decisive for value in values):
            return decisive
        return None if None in values else not decisive

    return evaluate


def _unary(node: ast.UnaryOp) -> Evaluate:
    operand = _compile(node.operand)
    if isinstance(node.op, ast.Not):

        def negate(facts: Mapping[str, Fact]) -> Fact:
            value = operand(facts)
            return None if value is None else not value

        return negate
    if isinstance(node.op, ast.USub):
        return _numeric(operator.neg, [operand])
    raise ExpressionError(f"{ast.unparse(node)!r} is outside the grammar")


def _binary(node: ast.BinOp) -> Evaluate:
    if type(node.op) not in _ARITHMETIC:
        raise ExpressionError(f"{ast.unparse(node)!r} is outside the grammar")
    return _numeric(_ARITHMETIC[type(node.op)], [_compile(node.left), _compile(node.right)])


def _call(node: ast.Call) -> Evaluate:
    if not isinstance(node.func, ast.Name) or node.func.id not in _CALLS or node.keywords or len(node.args) != 2:
        raise ExpressionError(f"{ast.unparse(node)!r}: only min, max and ceil of two values")
    return _numeric(_CALLS[node.func.id], [_compile(argument) for argument in node.args])


def _numeric(function: Callable[..., Any], operands: list[Evaluate]) -> Evaluate:
    def evaluate(facts: Mapping[str, Fact]) -> Fact:
        values = [operand(facts) for operand in operands]
        numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if len(numbers) != len(values) or any(abs(value) > _MAX_NUMBER for value in numbers):
            return None
        try:
            result: Fact = function(*numbers)
        except (ZeroDivisionError, OverflowError):
            return None
        return result

    return evaluate


def _compare(node: ast.Compare) -> Evaluate:
    kind, left = type(node.ops[0]), _compile(node.left)
    if len(node.ops) > 1:
        raise ExpressionError(f"{ast.unparse(node)!r}: one comparison at a time")
    if kind in _ORDER:
        return _numeric(_ORDER[kind], [left, _compile(node.comparators[0])])
    if kind in {ast.In, ast.NotIn}:
        return _membership(kind is ast.In, left, node.comparators[0])
    if kind not in {ast.Eq, ast.NotEq}:
        raise ExpressionError(f"{ast.unparse(node)!r}: comparison not allowed")
    right = _compile(node.comparators[0])

    def evaluate(facts: Mapping[str, Fact]) -> Fact:
        values = left(facts), right(facts)
        return None if None in values else (values[0] == values[1]) is (kind is ast.Eq)

    return evaluate


def _membership(wanted: bool, left: Evaluate, container: ast.expr) -> Evaluate:
    if not isinstance(container, ast.Tuple):
        raise ExpressionError(f"{ast.unparse(container)!r}: needs a tuple of values")
    members = [_constant(item) for item in container.elts if isinstance(item, ast.Constant)]
    if len(members) != len(container.elts):
        raise ExpressionError(f"{ast.unparse(container)!r}: needs a tuple of values")

    def evaluate(facts: Mapping[str, Fact]) -> Fact:
        value = left(facts)
        return None if value is None else (value in [member(facts) for member in members]) is wanted

    return evaluate


_COMPILERS: dict[type[ast.expr], Callable[[Any], Evaluate]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.BoolOp: _logic,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.Call: _call,
    ast.Compare: _compare,
}
