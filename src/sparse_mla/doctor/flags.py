"""Which options, environment variables and attention settings an engine's source knows."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine_source.tree import SourceTree

_OPTION_FILES = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/cli/serve.py", "envs.py")
_SETTING_FILES = ("config/attention.py", "config/kernel.py")


class Options:
    """``--option``, ``VLLM_VARIABLE`` and ``attention_config.field`` names of one source; read when first asked for."""

    def __init__(self, source: SourceTree) -> None:
        self._source = source
        self._names: frozenset[str] | None = None

    def has(self, name: str) -> bool:
        """Whether the source knows ``name``; True where none of its files can be read."""
        return not self.names or name in self.names

    @property
    def names(self) -> frozenset[str]:
        """Every name; empty when none of the files can be read."""
        if self._names is None:
            self._names = frozenset(self._read())
        return self._names

    def _read(self) -> set[str]:
        found = {
            node.value
            for path in _OPTION_FILES
            for node in self._walk(path)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("--", "VLLM_"))
        }
        for path in _SETTING_FILES if found else ():
            group = path.rpartition("/")[2].removesuffix(".py")
            for node in self._walk(path):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.add(f"{group}_config.{node.target.id}")
        return found

    def _walk(self, path: str) -> list[ast.AST]:
        tree = self._source.tree(path)
        return list(ast.walk(tree)) if tree is not None else []
