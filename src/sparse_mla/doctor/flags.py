"""Which options, environment variables and attention settings an engine's source knows."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .source import SourceTree

_OPTION_FILES = ("engine/arg_utils.py", "entrypoints/openai/cli_args.py", "entrypoints/cli/serve.py")
_VARIABLE_FILE = "envs.py"
_SETTING_FILES = ("config/attention.py", "config/kernel.py")


def known(source: SourceTree) -> frozenset[str] | None:
    """``--option``, ``VLLM_VARIABLE`` and ``attention_config.field`` names; None when none of the files can be read."""
    found: set[str] = set()
    for path in (*_OPTION_FILES, _VARIABLE_FILE):
        for node in _walk(source, path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    options = {text for text in found if text.startswith(("--", "VLLM_"))}
    if not options:
        return None
    for path in _SETTING_FILES:
        group = path.rpartition("/")[2].removesuffix(".py")
        for node in _walk(source, path):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options.add(f"{group}_config.{node.target.id}")
    return frozenset(options)


def _walk(source: SourceTree, path: str) -> list[ast.AST]:
    tree = source.tree(path)
    return list(ast.walk(tree)) if tree is not None else []
