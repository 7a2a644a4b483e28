"""The expressions in knowledge-base entries: integers, strings, facts by name, + - * // and comparisons, no calls but
min, max and ceil. A fact that nobody knows makes the result unknown (None), never false."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Fact = int | float | str | bool | None

_MAX_LENGTH = 400
_MAX_NUMBER = 1 << 62
_ARITHMETIC: dict[type[ast.operator], Callable[[int | float, int | float], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: dict[type[ast.cmpop], Callable[[int | float, int | float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _ceil(numerator: int | float, denominator: int | float) -> int | float:
    return -(-numerator // denominator)


_CALLS: dict[str, Callable[..., int | float]] = {"min": min, "max": max, "ceil": _ceil}


class ExpressionError(ValueError):
    """A knowledge-base expression uses something outside the grammar."""


class Expression:
    """One parsed expression; ``names`` are the facts it reads.

    Raises:
        ExpressionError: too long, not parseable, or outside the grammar.
    """

    __slots__ = ("_tree", "names", "text")

    def __init__(self, text: str) -> None:
        if len(text) > _MAX_LENGTH:
            raise ExpressionError(f"expression of {len(text)} characters, at most {_MAX_LENGTH}")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise ExpressionError(f"{text!r}: {error}") from None
        self.text = text.strip()
        self.names = frozenset(_check(self._tree))

    def value(self, facts: Mapping[str, Fact]) -> Fact:
        """The value under ``facts``; None when a fact it needs is missing, of the wrong kind, or out of range."""
        return _evaluate(self._tree, facts)

    def holds(self, facts: Mapping[str, Fact]) -> bool | None:
        """True, False, or None for unknown."""
        value = self.value(facts)
        return None if value is None else bool(value)


def _check(node: ast.expr) -> list[str]:
    """Names in ``node``; raises for a node outside the grammar."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, str)):
        return []
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.BoolOp):
        children = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        children = [node.operand]
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        children = [node.left, node.right]
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        if type(node.ops[0]) not in {*_ORDER, ast.Eq, ast.NotEq, ast.In, ast.NotIn}:
            raise ExpressionError(f"{ast.unparse(node)!r}: comparison not allowed")
        children = [node.left, *node.comparators]
    elif isinstance(node, ast.Tuple):
        children = node.elts
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        if node.keywords or len(node.args) != 2:
            raise ExpressionError(f"{ast.unparse(node)!r}: exactly two arguments")
        children = node.args
    else:
        raise ExpressionError(f"{ast.unparse(node)!r} is outside the grammar")
    return [name for child in children for name in _check(child)]


def _evaluate(node: ast.expr, facts: Mapping[str, Fact]) -> Fact:
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value]  # _check allows bool, int and str only
    if isinstance(node, ast.Name):
        return facts.get(node.id)
    if isinstance(node, ast.BoolOp):
        return _logic(node, facts)
    if isinstance(node, ast.UnaryOp):
        operand = _evaluate(node.operand, facts)
        if isinstance(node.op, ast.Not):
            return None if operand is None else not operand
        return -operand if isinstance(operand, (int, float)) else None
    if isinstance(node, ast.BinOp):
        numbers = [_evaluate(node.left, facts), _evaluate(node.right, facts)]
        return _number(_ARITHMETIC[type(node.op)], numbers)
    if isinstance(node, ast.Compare):
        return _compare(node, facts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _number(_CALLS[node.func.id], [_evaluate(argument, facts) for argument in node.args])
    return None


def _number(function: Callable[..., int | float], operands: list[Fact]) -> Fact:
    numbers = [value for value in operands if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) != len(operands) or any(abs(value) > _MAX_NUMBER for value in numbers):
        return None
    try:
        return function(*numbers)
    except (ZeroDivisionError, OverflowError):
        return None


def _logic(node: ast.BoolOp, facts: Mapping[str, Fact]) -> bool | None:
    """Kleene logic: a decided operand decides, whatever stays unknown beside it."""
    decisive = isinstance(node.op, ast.Or)
    values = [_evaluate(child, facts) for child in node.values]
    if any(value is not None and bool(value) is decisive for value in values):
        return decisive
    return None if None in values else not decisive


def _compare(node: ast.Compare, facts: Mapping[str, Fact]) -> bool | None:
    kind, right = type(node.ops[0]), node.comparators[0]
    left = _evaluate(node.left, facts)
    if left is None:
        return None
    if kind in {ast.In, ast.NotIn}:
        if not isinstance(right, ast.Tuple):
            return None
        members = [_evaluate(element, facts) for element in right.elts]
        found = left in members
        return (None if None in members and not found else found) if kind is ast.In else not found
    other = _evaluate(right, facts)
    if other is None:
        return None
    if kind is ast.Eq:
        return left == other
    if kind is ast.NotEq:
        return left != other
    if isinstance(left, (int, float)) and isinstance(other, (int, float)):
        return _ORDER[kind](left, other)
    return None
