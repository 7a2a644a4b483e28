"""Reads small functions of an engine's source: a tiny interpreter over syntax trees. It follows plain Python (conditions,
lists, strings, class attributes, methods), imports nothing, and says so where the code goes beyond that.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, ClassVar

from .evaluation import Scope
from .values import Method, Raised, Symbol, Unknown, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..engine_source.tree import SourceTree
    from .values import Choices, Class

_FUEL = 20_000
_DEPTH = 16
_MAX_ITEMS = 256


class _Return(Exception):  # noqa: N818  # control flow
    def __init__(self, value: Any) -> None:
        self.value = value
        super().__init__()


class Reader:
    """One run through some code. ``known`` gives values for dotted names that the caller decides, such as
    ``vllm.platforms.current_platform.is_cuda`` (a callable) or a module's ``_GCN_ARCH``.
    """

    def __init__(self, source: SourceTree, choices: Choices, known: Mapping[str, Any]) -> None:
        self.source = source
        self.choices = choices
        self.known = known
        self._fuel = _FUEL
        self._depth = 0

    def method(self, owner: Class, name: str) -> Method | None:
        """``name`` looked up on ``owner`` and its bases."""
        for path, node in self.source.lineage(owner.path, owner.name):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return Method(path, item, owner)
        return None

    def call(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        """Run a function with keyword arguments; those that it does not have are left out.

        Raises:
            Raised: the code raised.
            Unreadable: it goes beyond what is read.
        """
        self._depth += 1
        if self._depth > _DEPTH:
            raise Unreadable("calls nested too deeply")
        try:
            scope = self._scope(method, arguments)
            self._block(method.node.body, scope)
        except _Return as done:
            return done.value
        finally:
            self._depth -= 1
        return None

    def _scope(self, method: Method, arguments: Mapping[str, Any]) -> Scope:
        scope = Scope(self, method.path)
        spec = method.node.args
        parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
        defaults = dict(zip([a.arg for a in (*spec.posonlyargs, *spec.args)][::-1], spec.defaults[::-1], strict=False))
        defaults |= {
            a.arg: value for a, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value is not None
        }
        for parameter in parameters:
            name = parameter.arg
            if name in {"cls", "self"} and method.owner is not None:
                scope.names[name] = method.owner if name == "cls" else Unknown("self")
            elif name in arguments:
                scope.names[name] = arguments[name]
            elif name in defaults:
                scope.names[name] = scope.value(defaults[name])
            else:
                scope.names[name] = Unknown(name)
        return scope

    def burn(self) -> None:
        """Count one step; too many end the run."""
        self._fuel -= 1
        if self._fuel < 0:
            raise Unreadable("too many steps")

    def truth(self, value: Any) -> bool:
        """Whether ``value`` holds; an unknown one goes both ways, one per run."""
        if isinstance(value, Unknown):
            return self.choices.decide(value.text)
        if isinstance(value, Symbol):
            return self.choices.decide(value.path)
        return bool(value)

    def _block(self, body: list[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self.burn()
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        if isinstance(node, (ast.Pass, ast.Assert, ast.Import)):
            return
        handler = self._statements.get(type(node))
        if handler is None:
            raise Unreadable(type(node).__name__)
        handler(self, node, scope)

    def _branch(self, node: ast.If, scope: Scope) -> None:
        self._block(node.body if self.truth(scope.value(node.test)) else node.orelse, scope)

    def _leave(self, node: ast.Return, scope: Scope) -> None:
        raise _Return(scope.value(node.value) if node.value is not None else None)

    def _raise(self, node: ast.Raise, scope: Scope) -> None:
        raise Raised(_message(node, scope))

    def _expression(self, node: ast.Expr, scope: Scope) -> None:
        scope.value(node.value)

    def _import(self, node: ast.ImportFrom, scope: Scope) -> None:
        for alias in node.names:
            scope.names[alias.asname or alias.name] = scope.imported(node.module or "", alias.name)

    def _attempt(self, node: ast.Try, scope: Scope) -> None:
        try:
            self._block(node.body, scope)
        except Raised:
            if not node.handlers:
                raise
            self._block(node.handlers[0].body, scope)

    def _assign(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        if node.value is None:
            return
        value = scope.value(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                scope.names[target.id] = value
            elif not isinstance(target, ast.Attribute):  # attributes of objects do not matter to a decision
                raise Unreadable("assignment to " + type(target).__name__)

    def _loop(self, node: ast.For, scope: Scope) -> None:
        items = scope.value(node.iter)
        if not isinstance(items, (list, tuple)) or len(items) > _MAX_ITEMS or not isinstance(node.target, ast.Name):
            raise Unreadable("loop over " + ast.unparse(node.iter)[:80])
        for item in items:
            scope.names[node.target.id] = item
            self._block(node.body, scope)

    _statements: ClassVar[dict[type[ast.stmt], Callable[[Any, Any, Scope], None]]] = {
        ast.If: _branch,
        ast.Return: _leave,
        ast.Raise: _raise,
        ast.Assign: _assign,
        ast.AnnAssign: _assign,
        ast.For: _loop,
        ast.Expr: _expression,
        ast.ImportFrom: _import,
        ast.Try: _attempt,
    }


def _message(node: ast.Raise, scope: Scope) -> str:
    if isinstance(node.exc, ast.Call) and node.exc.args:
        text = scope.value(node.exc.args[0])
        return text if isinstance(text, str) else ast.unparse(node.exc.args[0])[:200]
    return ast.unparse(node.exc)[:200] if node.exc is not None else "raise"
