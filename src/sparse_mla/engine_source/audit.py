"""Probes of the engine's source: does this very tree have a known fault? Each answers faulty, sound or absent, and where."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .tree import SourceTree

FAULTY, SOUND, ABSENT = "faulty", "sound", "absent"

ROCM_OPS = "v1/attention/ops/rocm_aiter_mla_sparse.py"
ROCM_BACKEND = "v1/attention/backends/mla/rocm_aiter_mla_sparse.py"
INDEXER = "model_executor/layers/sparse_attn_indexer.py"
INDEXER_METADATA = "v1/attention/backends/mla/indexer.py"
MLA_LAYER = "model_executor/layers/attention/mla_attention.py"
CPU_PLATFORM = "platforms/cpu.py"
MODEL_FILES = ("model_executor/models/deepseek_v2.py", "models/deepseek_v32/attention.py")

_ROCM_INDEXER = "rocm_aiter_sparse_attn_indexer"
_CACHE_KERNELS = ("_indexer_k_quant_and_cache_kernel", "_cp_gather_indexer_quant_cache_kernel")
_SCHEDULE_KEYS = {"indexer_types", "index_topk_freq", "index_topk_pattern", "skip_topk"}


# Probes of the ROCm backend whose fault gives wrong tokens, and what it means for long prompts.
WRONG_OUTPUT: Mapping[str, str] = {
    "plan-key": "from the third chunk on, attention reuses the first chunk's work partition",
    "cache-layout": "index keys are misplaced at block size 1, at every length",
    "block-offset-width": "where one layer's index cache exceeds 2 GiB, keys beyond are written or read elsewhere",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The answer of one probe: ``status`` is faulty, sound or absent (the code it looks at is not there)."""

    id: str
    status: str
    where: str
    what: str


@lru_cache(maxsize=2)
def audit(source: SourceTree) -> Mapping[str, Probe]:
    """Every probe's answer, by id. A probe that meets code it cannot follow says absent, never faulty."""
    answers: dict[str, Probe] = {}
    for identifier, probe in PROBES.items():
        try:
            status, where, what = probe(source)
        except RecursionError:
            status, where, what = ABSENT, "", "the source is nested too deeply to be read"
        answers[identifier] = Probe(id=identifier, status=status, where=where, what=what)
    return answers


def wrong_output(source: SourceTree, class_path: str) -> list[str]:
    """What is known to give wrong tokens in the backend that ``class_path`` names, with file and line; empty if nothing.

    Args:
        class_path: as an engine states its choice, e.g. ``vllm.v1.attention.backends.mla.x.XBackend``.
    """
    if source.module_path(class_path.rpartition(".")[0]) != ROCM_BACKEND:
        return []
    answers = audit(source)
    return [
        f"{meaning} ({answers[name].where}: {answers[name].what})"
        for name, meaning in WRONG_OUTPUT.items()
        if answers[name].status == FAULTY
    ]


_Answer = tuple[str, str, str]
_NOT_THERE: _Answer = (ABSENT, "", "this version has no such code")
_COMPILED: _Answer = (ABSENT, "", "the indexer calls compiled operators, which cannot be read here")


def _gather_skip(source: SourceTree) -> _Answer:
    loop = _prefill_loop(source)
    if loop is None or not _mentions(source.tree(INDEXER_METADATA), {"skip_kv_gather"}):
        return _NOT_THERE
    if _mentions(loop, {"skip_kv_gather"}):
        return SOUND, f"{ROCM_OPS}:{loop.lineno}", "the prefill loop reads skip_kv_gather"
    return (
        FAULTY,
        f"{ROCM_OPS}:{loop.lineno}",
        "the prefill loop gathers for every chunk and never reads skip_kv_gather",
    )


def _scratch_reserved(source: SourceTree) -> _Answer:
    branch = _profiling_branch(source)
    if branch is None:
        return _NOT_THERE
    where = f"{ROCM_OPS}:{branch.lineno}"
    if any(_mentions(statement, {"get_simultaneous", "reserve_workspace"}) for statement in branch.body):
        return SOUND, where, "the branch without metadata reserves the prefill buffers in the workspace"
    return FAULTY, where, "the branch without metadata reserves nothing in the workspace"


def _decode_logits_rows(source: SourceTree) -> _Answer:
    branch = _profiling_branch(source)
    shapes = [node for node in ast.walk(branch) if isinstance(node, ast.Tuple)] if branch else []
    for shape in shapes:
        if not any(isinstance(size, ast.Name) and size.id == "max_model_len" for size in shape.elts):
            continue
        where = f"{ROCM_OPS}:{shape.lineno}"
        if _mentions(shape, {"hidden_states"}):
            return FAULTY, where, f"decode scores are reserved as {ast.unparse(shape)}: one row per batched token"
        return SOUND, where, f"decode scores are reserved as {ast.unparse(shape)}"
    return _NOT_THERE


def _plan_key(source: SourceTree) -> _Answer:
    build = _builder_method(source)
    key = _cached_key(build) if build else None
    if build is None or key is None:
        return ABSENT, "", "no plan is cached between steps"
    where = f"{ROCM_BACKEND}:{key.lineno}"
    parts = [part for element in key.elts for part in _definitions(element, build)]
    context = any(_is_context_length(part) for part in parts)
    if not any(_mentions(part, {"seq_lens", "seq_lens_cpu"}) for part in parts):
        return ABSENT, where, "the cached plan's key does not depend on sequence lengths"
    if context:
        return SOUND, where, "the cached plan's key holds context and query lengths"
    return FAULTY, where, "the cached plan's key holds clamped sequence lengths but no context lengths"


def _cache_layout(source: SourceTree) -> _Answer:
    launches = _cache_launches(source)
    if not launches:
        return _COMPILED
    for call in launches:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(isinstance(value, ast.Constant) and value.value == "SHUFFLE" for value in values):
            return FAULTY, f"{ROCM_OPS}:{call.lineno}", f"{_launched(call)} is launched with a fixed SHUFFLE layout"
    return SOUND, f"{ROCM_OPS}:{launches[0].lineno}", "no launch fixes the shuffled layout"


def _block_offset_width(source: SourceTree) -> _Answer:
    launched = {_launched(call) for call in _cache_launches(source)}
    kernels = [kernel for name in launched if (kernel := source.function(ROCM_OPS, name)) is not None]
    narrow = [kernel for kernel in kernels if _reads_block_table(kernel) and not _mentions(kernel, {"int64"})]
    if not any(_reads_block_table(kernel) for kernel in kernels):
        return _COMPILED
    if narrow:
        return (
            FAULTY,
            f"{ROCM_OPS}:{narrow[0].lineno}",
            f"{narrow[0].name} multiplies a 32-bit block number by the stride",
        )
    return SOUND, f"{ROCM_OPS}:{kernels[0].lineno}", "block numbers are widened to 64 bits"


def _metadata_contract(source: SourceTree) -> _Answer:
    name = "ROCMAiterMLASparseMetadata"
    lineage = source.lineage(ROCM_BACKEND, name)
    forward = source.function(MLA_LAYER, "forward_impl")
    if not lineage or forward is None:
        return _NOT_THERE
    fields = {
        item.target.id
        for _, node in lineage
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    where = f"{ROCM_BACKEND}:{lineage[0][1].lineno}"
    for read in _unguarded_reads(forward):
        if read.attr not in fields:
            return FAULTY, where, f"{name} has no field {read.attr}, which {MLA_LAYER}:{read.lineno} reads"
    return SOUND, where, f"{name} has every field that the MLA layer reads"


def _topk_sentinel(source: SourceTree) -> _Answer:
    function = source.function(ROCM_OPS, _ROCM_INDEXER)
    if function is None:
        return _NOT_THERE
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.value) == "-1"
            and _mentions(node.targets[0], {"topk_indices_buffer"})
        ):
            return SOUND, f"{ROCM_OPS}:{node.lineno}", "the selection buffer is set to -1 first"
    return FAULTY, f"{ROCM_OPS}:{function.lineno}", "the selection buffer is never set to -1"


def _keys_cut(source: SourceTree) -> _Answer:
    function = source.function(ROCM_OPS, _ROCM_INDEXER)
    if function is None:
        return _NOT_THERE
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node).replace(" ", "").startswith("k=k[:"):
            return SOUND, f"{ROCM_OPS}:{node.lineno}", "keys are cut to the length of slot_mapping"
    return FAULTY, f"{ROCM_OPS}:{function.lineno}", "keys are written without being cut to the length of slot_mapping"


def _topk_width(source: SourceTree) -> _Answer:
    function = source.function(ROCM_OPS, _ROCM_INDEXER)
    if function is None:
        return _NOT_THERE
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and "topk_tokens == 2048" in ast.unparse(node.test):
            return FAULTY, f"{ROCM_OPS}:{node.lineno}", "the indexer asserts index_topk == 2048"
    return SOUND, f"{ROCM_OPS}:{function.lineno}", "the indexer asserts no width"


def _index_share(source: SourceTree) -> _Answer:
    trees = [(path, tree) for path in MODEL_FILES if (tree := source.tree(path)) is not None]
    if not trees:
        return _NOT_THERE
    for path, tree in trees:
        if _mentions(tree, _SCHEDULE_KEYS):
            return SOUND, path, "the model reads which layers own an indexer"
    return FAULTY, trees[0][0], "the model builds an indexer in every layer and reads no schedule"


def _cpu_refuses(source: SourceTree) -> _Answer:
    function = source.function(CPU_PLATFORM, "get_attn_backend_cls")
    if function is None:
        return _NOT_THERE
    for node in ast.walk(function):
        if (
            isinstance(node, ast.If)
            and _mentions(node.test, {"use_sparse"})
            and any(isinstance(item, ast.Raise) for item in node.body)
        ):
            return FAULTY, f"{CPU_PLATFORM}:{node.lineno}", "the CPU platform raises for every sparse model"
    return SOUND, f"{CPU_PLATFORM}:{function.lineno}", "the CPU platform does not refuse sparse models"


PROBES: dict[str, Callable[[SourceTree], _Answer]] = {
    "plan-key": _plan_key,
    "cache-layout": _cache_layout,
    "block-offset-width": _block_offset_width,
    "scratch-reserved": _scratch_reserved,
    "gather-skip": _gather_skip,
    "decode-logits-rows": _decode_logits_rows,
    "rocm-metadata-contract": _metadata_contract,
    "topk-sentinel": _topk_sentinel,
    "keys-cut-to-slots": _keys_cut,
    "topk-width": _topk_width,
    "index-share": _index_share,
    "cpu-refuses-sparse": _cpu_refuses,
}


def _mentions(node: ast.AST | None, words: set[str]) -> bool:
    """Whether a name, attribute, argument or string among ``words`` occurs in ``node``."""
    for child in ast.walk(node) if node is not None else ():
        if isinstance(child, ast.Name) and child.id in words:
            return True
        if isinstance(child, ast.Attribute) and child.attr in words:
            return True
        if isinstance(child, (ast.arg, ast.keyword)) and child.arg in words:
            return True
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value in words:
            return True
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id in words:
            return True
    return False


def _calls(node: ast.AST | None) -> Iterator[ast.Call]:
    return (child for child in ast.walk(node) if isinstance(child, ast.Call)) if node is not None else iter(())


def _launched(call: ast.Call) -> str:
    """Name of the kernel in ``kernel[grid](...)``, else ""."""
    inner = call.func.value if isinstance(call.func, ast.Subscript) else None
    return inner.id if isinstance(inner, ast.Name) else ""


def _cache_launches(source: SourceTree) -> list[ast.Call]:
    """Launches of the Triton writer and gather of index keys, in the wrappers that the ROCm indexer calls."""
    indexer, tree = source.function(ROCM_OPS, _ROCM_INDEXER), source.tree(ROCM_OPS)
    called = {call.func.id for call in _calls(indexer) if isinstance(call.func, ast.Name)}
    wrappers = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in called] if tree else []
    return [call for wrapper in wrappers for call in _calls(wrapper) if _launched(call) in _CACHE_KERNELS]


def _prefill_loop(source: SourceTree) -> ast.For | None:
    function = source.function(ROCM_OPS, _ROCM_INDEXER)
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Attribute) and node.iter.attr == "chunks":
            return node
    return None


def _profiling_branch(source: SourceTree) -> ast.If | None:
    """The branch for a run without attention metadata: ``if not isinstance(attn_metadata, dict)`` or ``is None``."""
    function = source.function(ROCM_OPS, _ROCM_INDEXER)
    for node in ast.walk(function) if function else ():
        if isinstance(node, ast.If) and _mentions(node.test, {"attn_metadata"}):
            test = ast.unparse(node.test)
            if test.startswith("not isinstance") or test.endswith("is None"):
                return node
    return None


def _builder_method(source: SourceTree) -> ast.FunctionDef | None:
    node = source.klass(ROCM_BACKEND, "ROCMAiterMLASparseMetadataBuilder")
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)] if node else []
    return next((method for method in methods if _cached_key(method) is not None), None)


def _cached_key(function: ast.FunctionDef) -> ast.Tuple | None:
    """The tuple that is compared with, and stored in, an attribute of self whose name ends in ``key``."""
    stored = {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and any(isinstance(target, ast.Attribute) and target.attr.endswith("key") for target in node.targets)
    }
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        if stored & {target.id for target in node.targets if isinstance(target, ast.Name)}:
            return node.value
    return None


def _definitions(element: ast.expr, function: ast.FunctionDef) -> list[ast.expr]:
    """``element`` and what the names in it were assigned in ``function`` (two steps back)."""
    found, frontier = [element], [element]
    for _ in range(2):
        names = {node.id for part in frontier for node in ast.walk(part) if isinstance(node, ast.Name)}
        frontier = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
        ]
        found += frontier
    return found


def _is_context_length(part: ast.expr) -> bool:
    for node in ast.walk(part):
        if isinstance(node, ast.Name) and "context_len" in node.id:
            return True
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Sub)
            and _mentions(node.left, {"seq_lens", "seq_lens_cpu"})
        ):
            return True
    return False


def _reads_block_table(kernel: ast.FunctionDef) -> bool:
    return any("block_table" in argument.arg for argument in kernel.args.args)


def _unguarded_reads(function: ast.FunctionDef) -> list[ast.Attribute]:
    """Decode-count fields read from ``attn_metadata`` other than in the else of a test for sparse implementations."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.If) and "sparse" in ast.unparse(node.test):
            other = node.orelse if "not" not in ast.unparse(node.test) else node.body
            skipped |= {child for statement in other for child in ast.walk(statement)}
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in {"num_decodes", "num_prefills", "num_decode_tokens"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "attn_metadata"
        and node not in skipped
    ]
