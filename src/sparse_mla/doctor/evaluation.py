"""Values of expressions in an engine's source, as far as the source alone gives them."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any, ClassVar

from .values import Class, Method, Record, Symbol, Unknown, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from .reading import Reader

_MAX_ITEMS = 256
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda left, right: left is right or left == right,
    ast.IsNot: lambda left, right: not (left is right or left == right),
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"int": int, "bool": bool, "len": len, "str": str, "min": min, "max": max}
_METHODS: dict[type, set[str]] = {
    list: {"append", "insert", "extend", "remove", "pop", "index", "count"},
    str: {"startswith", "endswith", "lower", "upper", "strip", "removeprefix", "split", "join"},
    dict: {"get", "keys", "values", "items"},
}


class Scope:
    """Names of one function call, and the module around it."""

    def __init__(self, reader: Reader, path: str) -> None:
        self.reader = reader
        self.path = path
        self.names: dict[str, Any] = {}

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; Unknown where something undecided takes part."""
        self.reader.burn()
        handler = self._handlers.get(type(node))
        if handler is None:
            return Unknown(_text(node))
        return handler(self, node)

    def imported(self, module: str, name: str) -> Any:
        """What ``from module import name`` gives: a value that the caller knows, a definition of the tree, or a symbol."""
        dotted = f"{module}.{name}"
        if dotted in self.reader.known:
            return self.reader.known[dotted]
        path = self.reader.source.module_path(module)
        return self._definition(path, name) if path else Symbol(dotted)

    def _definition(self, path: str, name: str) -> Any:
        """What ``name`` means at the top of the module ``path``."""
        module = "vllm." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if f"{module}.{name}" in self.reader.known:
            return self.reader.known[f"{module}.{name}"]
        tree = self.reader.source.tree(path)
        for node in tree.body if tree else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Method(path, node, None)
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Class(path, name)
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return Scope(self.reader, path).value(node.value)
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.imported(node.module, alias.name)
        return Symbol(name)

    def _name(self, node: ast.Name) -> Any:
        return self.names[node.id] if node.id in self.names else self._definition(self.path, node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        base = self.value(node.value)
        if isinstance(base, Symbol):
            dotted = f"{base.path}.{node.attr}"
            return self.reader.known.get(dotted, Symbol(dotted))
        if isinstance(base, Record):
            return base.fields.get(node.attr, Unknown(f"{base.kind}'s {node.attr}"))
        if isinstance(base, Class):
            return self._class_attribute(base, node.attr)
        return Unknown(_text(node))

    def _class_attribute(self, owner: Class, name: str) -> Any:
        for path, definition in self.reader.source.lineage(owner.path, owner.name):
            for item in definition.body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    return Method(path, item, owner)
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
                value = getattr(item, "value", None)
                if value is not None and any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    return Scope(self.reader, path).value(value)
        bases = self.reader.source.lineage(owner.path, owner.name)
        if bases and any(getattr(base, "id", "").endswith("Enum") for _, node in bases for base in node.bases):
            return Symbol(f"{owner.name}.{name}")
        return Unknown(f"{owner.name}.{name}")

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if node.func.attr in _METHODS.get(type(base), set()):
                return self._plain(node, getattr(base, node.func.attr))
        if isinstance(node.func, ast.Name) and node.func.id not in self.names:
            special = _SPECIAL.get(node.func.id)
            if special is not None:
                return special(self, node)
            if node.func.id in _FUNCTIONS:
                return self._plain(node, _FUNCTIONS[node.func.id])
        target = self.value(node.func)
        if isinstance(target, Method):
            return self._follow(target, node)
        if isinstance(target, Class) and target.name == "MultipleOf" and node.args:
            return Record("page size", {"base": self.value(node.args[0])})
        return target(*self._arguments(node)) if callable(target) else Unknown(_text(node))

    def _follow(self, target: Method, node: ast.Call) -> Any:
        spec = target.node.args
        names = [argument.arg for argument in (*spec.posonlyargs, *spec.args) if argument.arg not in {"cls", "self"}]
        arguments = dict(zip(names, self._arguments(node), strict=False))
        for keyword in node.keywords:
            if keyword.arg is None:
                return Unknown(_text(node))
            arguments[keyword.arg] = self.value(keyword.value)
        if target.owner is None and target.node.name.lstrip("_").startswith("has_"):
            return Unknown(_text(node))  # asks what is installed: the name says it better than its code
        try:
            return self.reader.call(target, arguments)
        except Unreadable:
            return Unknown(_text(node))

    def _arguments(self, node: ast.Call) -> list[Any]:
        return self._items(node.args)

    def _plain(self, node: ast.Call, function: Callable[..., Any]) -> Any:
        arguments = self._arguments(node)
        unknown = next((item for item in arguments if isinstance(item, (Unknown, Symbol))), None)
        if unknown is not None and not isinstance(getattr(function, "__self__", None), list):
            return Unknown(_text(node))
        try:
            return function(*arguments)
        except (TypeError, ValueError, IndexError, KeyError):
            return Unknown(_text(node))

    def _items(self, nodes: list[ast.expr]) -> list[Any]:
        items: list[Any] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            if isinstance(node, ast.Starred):
                if not isinstance(value, (list, tuple)):
                    raise Unreadable("unpacking " + _text(node))
                items += value
            else:
                items.append(value)
        return items

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        items = self._items(node.elts)
        return items if isinstance(node, ast.List) else tuple(items)

    def _compare(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.value(right_node)
            if _undecided(left, right) or (
                isinstance(right, (list, tuple)) and any(_undecided(left, r) for r in right)
            ):
                return Unknown(_text(node))
            try:
                if not _COMPARISONS[type(kind)](left, right):
                    return False
            except TypeError:
                return Unknown(_text(node))
            left = right
        return True

    def _logic(self, node: ast.BoolOp) -> Any:
        decisive = isinstance(node.op, ast.Or)
        pending: list[str] = []
        value: Any = not decisive
        for child in node.values:
            value = self.value(child)
            if isinstance(value, (Unknown, Symbol)):
                pending.append(value.text if isinstance(value, Unknown) else value.path)
            elif bool(value) is decisive:
                return value
        return Unknown((" or " if decisive else " and ").join(pending)) if pending else value

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if isinstance(value, (Unknown, Symbol)):
            # Decided here, so that `x` and `not x` go opposite ways in one run.
            return not self.reader.truth(value) if isinstance(node.op, ast.Not) else Unknown(_text(node))
        if isinstance(node.op, ast.Not):
            return not value
        return -value if isinstance(node.op, ast.USub) and isinstance(value, (int, float)) else Unknown(_text(node))

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        function = _ARITHMETIC.get(type(node.op))
        if function is None or isinstance(left, (Unknown, Symbol)) or isinstance(right, (Unknown, Symbol)):
            return Unknown(_text(node))
        try:
            return function(left, right)
        except (TypeError, ValueError, ArithmeticError):
            return Unknown(_text(node))

    def _conditional(self, node: ast.IfExp) -> Any:
        return self.value(node.body if self.reader.truth(self.value(node.test)) else node.orelse)

    def _joined(self, node: ast.JoinedStr) -> str:
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _shown(self.value(part.value), part)  # type: ignore[attr-defined]
            for part in node.values
        )

    def _generator(self, node: ast.GeneratorExp | ast.ListComp) -> Any:
        loop = node.generators[0]
        items = self.value(loop.iter)
        if len(node.generators) > 1 or not isinstance(items, (list, tuple)) or not isinstance(loop.target, ast.Name):
            return Unknown(_text(node))
        kept = []
        for item in items[:_MAX_ITEMS]:
            self.names[loop.target.id] = item
            if all(self.reader.truth(self.value(test)) for test in loop.ifs):
                kept.append(self.value(node.elt))
        return kept

    _handlers: ClassVar[dict[type[ast.expr], Callable[[Any, Any], Any]]] = {
        ast.Constant: lambda _, node: node.value,
        ast.Name: _name,
        ast.Attribute: _attribute,
        ast.Call: _call,
        ast.List: _sequence,
        ast.Tuple: _sequence,
        ast.Set: _sequence,
        ast.Compare: _compare,
        ast.BoolOp: _logic,
        ast.UnaryOp: _unary,
        ast.BinOp: _binary,
        ast.IfExp: _conditional,
        ast.JoinedStr: _joined,
        ast.GeneratorExp: _generator,
        ast.ListComp: _generator,
    }


def _undecided(left: Any, right: Any) -> bool:
    """Two different symbols of torch are different values; any other symbol may equal anything but None."""
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return True
    if isinstance(left, Symbol) and isinstance(right, Symbol):
        return left != right and not (left.path.startswith("torch.") and right.path.startswith("torch."))
    return (isinstance(left, Symbol) and isinstance(right, (int, str)) and right is not None) or (
        isinstance(right, Symbol) and isinstance(left, (int, str)) and left is not None
    )


def _text(node: ast.AST) -> str:
    return ast.unparse(node)[:120]


def _shown(value: Any, part: ast.AST) -> str:
    return "{" + _text(part).strip("f'{}") + "}" if isinstance(value, (Unknown, Symbol, Record)) else str(value)


def _getattr(scope: Scope, node: ast.Call) -> Any:
    base, name = scope.value(node.args[0]), scope.value(node.args[1])
    if isinstance(base, Record) and isinstance(name, str):
        if name in base.fields:
            return base.fields[name]
        return scope.value(node.args[2]) if len(node.args) > 2 and base.fields else Unknown(f"{base.kind}'s {name}")
    return Unknown(_text(node))


def _hasattr(scope: Scope, node: ast.Call) -> Any:
    base, name = scope.value(node.args[0]), scope.value(node.args[1])
    return name in base.fields if isinstance(base, Record) and base.fields else Unknown(_text(node))


def _isinstance(scope: Scope, node: ast.Call) -> Any:
    value, kind = scope.value(node.args[0]), _text(node.args[1])
    if kind in {"int", "str", "list", "tuple"} and not isinstance(value, (Unknown, Symbol)):
        return type(value).__name__ == kind
    return isinstance(value, Record) and value.kind == "page size" if kind == "MultipleOf" else Unknown(_text(node))


def _quantifier(function: Callable[[list[bool]], bool]) -> Callable[[Scope, ast.Call], Any]:
    def evaluate(scope: Scope, node: ast.Call) -> Any:
        items = scope.value(node.args[0])
        if not isinstance(items, (list, tuple)):
            return Unknown(_text(node))
        return function([scope.reader.truth(item) for item in items])

    return evaluate


_SPECIAL: dict[str, Callable[[Scope, ast.Call], Any]] = {
    "getattr": _getattr,
    "hasattr": _hasattr,
    "isinstance": _isinstance,
    "any": _quantifier(any),
    "all": _quantifier(all),
}
