"""Which sparse backends an engine version offers a device, read from its own selection code without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .facts import device_facts
from .reading import Reader
from .selector import NOT_SPARSE, Candidate, Selection, judge
from .values import Choices, Class, Method, Raised, Record, Symbol, Unknown, Unreadable, explore

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine_source.tree import SourceTree
    from .values import Outcome

VALID, INVALID, DEPENDS, UNREADABLE = "valid", "invalid", "depends", "unreadable"

_PLATFORMS = {"nvidia": "platforms/cuda.py", "amd": "platforms/rocm.py", "cpu": "platforms/cpu.py"}
_REGISTRY = "v1/attention/backends/registry.py"
_INDEXER = "model_executor/layers/sparse_attn_indexer.py"
_PRIORITIES = "_get_backend_priorities"
# DeepGEMM's paged and ragged logits exist for these only, whatever the engine's gates ask.
_DEEPGEMM_ARCHS = ("sm90", "sm100", "sm103", "sm120", "sm121")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One backend's answer for a device.

    Attributes:
        status: valid, invalid, depends (on ``conditions``) or unreadable.
        reasons: why not, in the engine's own words.
        dense: it does not do sparse attention at all, so its other reasons do not matter.
    """

    name: str
    status: str
    reasons: tuple[str, ...]
    conditions: tuple[str, ...]
    dense: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Offers:
    """The engine's whole answer: how it was found out, what every backend says, and what the indexer adds."""

    arch: str
    how: str
    backends: tuple[Offer, ...]
    indexer: Offer | None
    notes: tuple[str, ...]

    @property
    def usable(self) -> tuple[str, ...]:
        """Sparse backends that the engine would take (or may, on conditions), provided that the indexer runs."""
        return tuple(offer.name for offer in self.backends if offer.status in {VALID, DEPENDS} and not offer.dense)

    @property
    def refusal(self) -> Selection | None:
        """The answer as a selector error, where every backend is known to refuse; None otherwise."""
        if not self.backends or any(offer.status != INVALID for offer in self.backends) or self.arch == "cpu":
            return None
        return judge(tuple(Candidate(name=offer.name, reasons=offer.reasons) for offer in self.backends), {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the engine is asked for: the fields of its AttentionSelectorConfig that matter here."""

    arch: str
    head_size: int = 576
    num_heads: int | None = None
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    dcp: int = 1
    model: Mapping[str, Any] | None = None


def read(source: SourceTree, request: Request) -> Offers:
    """Read ``source`` for ``request``; never raises: what cannot be followed is reported as unreadable."""
    vendor = device_facts(request.arch)["vendor"]
    platform = _PLATFORMS.get(str(vendor), "")
    how = f"read from the source of vLLM {source.version or '(version unknown)'}, not run"
    if source.tree(platform) is None:
        return Offers(arch=request.arch, how=how, backends=(), indexer=None, notes=(f"{platform} cannot be read",))
    if vendor == "cpu":
        return Offers(arch=request.arch, how=how, backends=(_platform_itself(source, request),), indexer=None, notes=())
    backends = tuple(_offer(source, request, name) for name in _priorities(source, platform, request))
    gate = "forward_hip" if vendor == "amd" else "__init__"
    notes = () if vendor == "amd" or request.arch in _DEEPGEMM_ARCHS else (_no_deepgemm(request.arch),)
    return Offers(arch=request.arch, how=how, backends=backends, indexer=_indexer(source, request, gate), notes=notes)


def _no_deepgemm(arch: str) -> str:
    return f"the indexer's logits come from DeepGEMM, which has no kernels for {arch}: importing it would not help"


def _known(request: Request) -> dict[str, Any]:
    """Values for the names that stand for the machine and the run."""
    vendor = device_facts(request.arch)["vendor"]
    platform = "vllm.platforms.current_platform"
    kinds = {"is_cuda": "nvidia", "is_rocm": "amd", "is_cpu": "cpu", "is_xpu": "xpu"}
    model = Record("model config", request.model or {})
    run = Record(
        "engine config",
        {
            "model_config": Record("model config", {"hf_text_config": model, "hf_config": model}),
            "parallel_config": Record(
                "parallel config",
                {"decode_context_parallel_size": request.dcp, "prefill_context_parallel_size": 1},
            ),
        },
    )
    known: dict[str, Any] = {f"{platform}.{name}": (lambda kind=kind: vendor == kind) for name, kind in kinds.items()}
    known[platform] = Symbol(platform)
    known["vllm.platforms.rocm._GCN_ARCH"] = request.arch
    for name in ("get_current_vllm_config", "get_current_vllm_config_or_none"):
        known[f"vllm.config.{name}"] = lambda: run
    known["vllm.v1.attention.backend.AttentionType.DECODER"] = "decoder"
    return known


def _arguments(request: Request) -> dict[str, Any]:
    sm = device_facts(request.arch)["sm"]
    number = int(sm) if isinstance(sm, int) else 0
    return {
        "use_mla": True,
        "use_sparse": True,
        "has_sink": False,
        "head_size": request.head_size,
        "num_heads": request.num_heads,
        "dtype": Symbol(f"torch.{request.dtype}"),
        "kv_cache_dtype": request.kv_cache_dtype,
        "block_size": request.block_size,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        "has_sliding_window": False,
        "use_non_causal": False,
        "use_batch_invariant": False,
        "use_kv_connector": False,
        "use_pcp": False,
        "use_dcp": request.dcp > 1,
        "use_adaptive_verification": False,
        "use_rswa": False,
        "device_capability": Record("capability", {"major": number // 10, "minor": number % 10})
        if number
        else Unknown("capability"),
    }


def _run(source: SourceTree, request: Request, method: Method, arguments: Mapping[str, Any]) -> list[Outcome]:
    def once(choices: Choices) -> Any:
        try:
            return Reader(source, choices, _known(request)).call(method, arguments)
        except (Raised, Unreadable) as error:
            return error
        except RecursionError:
            return Unreadable("nested too deeply")

    return explore(once)


def _priorities(source: SourceTree, platform: str, request: Request) -> list[str]:
    node = source.function(platform, _PRIORITIES)
    if node is None:
        return []
    names: list[str] = []
    for outcome in _run(source, request, Method(platform, node, None), _arguments(request)):
        for item in outcome.result if isinstance(outcome.result, list) else ():
            name = item.path.rpartition(".")[2] if isinstance(item, Symbol) else _enum_name(source, item)
            if name and name not in names:
                names.append(name)
    return names


def _class_paths(source: SourceTree) -> dict[str, str]:
    """Member -> dotted class path of the backend enum."""
    node = source.klass(_REGISTRY, "AttentionBackendEnum")
    return {
        target.id: item.value.value
        for item in (node.body if node else ())
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Constant) and isinstance(item.value.value, str)
        for target in item.targets
        if isinstance(target, ast.Name)
    }


def _enum_name(source: SourceTree, value: object) -> str:
    return next((name for name, path in _class_paths(source).items() if path == value), "")


def _offer(source: SourceTree, request: Request, name: str) -> Offer:
    dotted = _class_paths(source).get(name, "")
    path = source.module_path(dotted.rpartition(".")[0])
    here = source.resolve(path, dotted.rpartition(".")[2]) if path else None
    if here is None:
        return Offer(name=name, status=UNREADABLE, reasons=(f"{dotted or name} is not in this tree",), conditions=())
    owner = Class(here[0], here[1].name)
    validate = Reader(source, Choices(()), {}).method(owner, "validate_configuration")
    if validate is None:
        return Offer(name=name, status=UNREADABLE, reasons=("no validate_configuration",), conditions=())
    return _summarise(name, _run(source, request, validate, _arguments(request)))


def _summarise(name: str, outcomes: list[Outcome]) -> Offer:
    lists = [outcome.result for outcome in outcomes if isinstance(outcome.result, list)]
    if len(lists) < len(outcomes) or not lists:
        trouble = next(str(outcome.result) for outcome in outcomes if not isinstance(outcome.result, list))
        return Offer(name=name, status=UNREADABLE, reasons=(trouble,), conditions=())
    texts = [[item if isinstance(item, str) else "undecided" for item in result] for result in lists]
    certain = tuple(text for text in texts[0] if all(text in other for other in texts))
    conditions = _decisive([outcome for outcome in outcomes if outcome.result], outcomes)
    dense = NOT_SPARSE in certain
    if all(texts):
        return Offer(name=name, status=INVALID, reasons=certain or tuple(texts[0]), conditions=(), dense=dense)
    if not any(texts):
        return Offer(name=name, status=VALID, reasons=(), conditions=())
    possible = tuple(dict.fromkeys(text for result in texts for text in result))
    return Offer(name=name, status=DEPENDS, reasons=possible, conditions=conditions)


def _decisive(refusals: list[Outcome], outcomes: list[Outcome]) -> tuple[str, ...]:
    """Conditions that go one way in every refusal, and not so in every other outcome."""
    shared = set.intersection(*(set(outcome.assumed) for outcome in refusals)) if refusals else set()
    others = [outcome for outcome in outcomes if outcome not in refusals]
    kept = [(text, way) for text, way in refusals[0].assumed if (text, way) in shared] if refusals else []
    decisive = [(text, way) for text, way in kept if any((text, way) not in other.assumed for other in others)]
    if not decisive:  # several ways lead to a refusal: name what was asked on them
        asked = dict.fromkeys(part for outcome in refusals for text, _ in outcome.assumed for part in _parts(text))
        return (f"these are not as it wants them: {', '.join(asked)}",)
    return tuple(_condition(text, way) for text, way in decisive)


def _parts(text: str) -> list[str]:
    return [part for one in text.split(" or ") for part in one.split(" and ")]


def _condition(text: str, way: bool) -> str:
    if way:
        return text
    return f"not ({text})" if " " in text else f"not {text}"


def _platform_itself(source: SourceTree, request: Request) -> Offer:
    """The CPU platform decides in its own method and has no list."""
    node = source.function(_PLATFORMS["cpu"], "get_attn_backend_cls")
    if node is None:
        return Offer(name="CPU", status=UNREADABLE, reasons=("no get_attn_backend_cls",), conditions=())
    config = Record("selector config", _arguments(request))
    arguments = {"selected_backend": None, "attn_selector_config": config, "num_heads": request.num_heads}
    outcomes = _run(source, request, Method(_PLATFORMS["cpu"], node, None), arguments)
    raised = [outcome.result.text for outcome in outcomes if isinstance(outcome.result, Raised)]
    if len(raised) == len(outcomes):
        return Offer(name="CPU", status=INVALID, reasons=tuple(dict.fromkeys(raised)), conditions=())
    unread = any(isinstance(outcome.result, Unreadable) for outcome in outcomes)
    return Offer(name="CPU", status=UNREADABLE if unread else DEPENDS, reasons=tuple(raised), conditions=())


def _indexer(source: SourceTree, request: Request, gate: str) -> Offer | None:
    """What the indexer itself demands, after the selector has agreed."""
    here = source.klass(_INDEXER, "SparseAttnIndexer")
    node = (
        next((item for item in here.body if isinstance(item, ast.FunctionDef) and item.name == gate), None)
        if here
        else None
    )
    if node is None:
        return None
    outcomes = _run(source, request, Method(_INDEXER, node, None), {"self": Unknown("self")})
    raised = [outcome for outcome in outcomes if isinstance(outcome.result, Raised)]
    reasons = tuple(dict.fromkeys(outcome.result.text for outcome in raised))
    if not raised:
        return Offer(name="indexer", status=VALID, reasons=(), conditions=())
    if len(raised) == len(outcomes):
        return Offer(name="indexer", status=INVALID, reasons=reasons, conditions=())
    conditions = _decisive(raised, outcomes)
    return Offer(name="indexer", status=DEPENDS, reasons=reasons, conditions=conditions)
