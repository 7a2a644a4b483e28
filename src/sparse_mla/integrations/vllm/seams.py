"""Everything that touches an internal of vLLM: one function a seam, with the versions it was checked against and what
ends it. The rest of this package calls vLLM only through here and ``layer_seams``. Importing this file imports no engine.

The demands of each seam are checked against the installed source before ours serves (``contract.mismatches``), so a
vLLM that changed under a seam is refused at start-up and never met by a request.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...cache import fp8_ds_mla, plain
from ...shapes import dtype_name
from .contract import Demand, seam

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from ...cache import CacheFormat
    from ...dims import MLADims

SUPPORTED = ">=0.32,<0.33"
"""vLLM versions that the seams were run with; a version outside is refused where ours would serve."""
CHECKED = ("0.32.0",)
BACKEND_NAME = "SPARSE_MLA"
BACKEND_PATH = "sparse_mla.integrations.vllm.backend.SparseMLABackend"


_PATCHED: set[str] = set()


def first_time(name: str) -> bool:
    """Whether ``name`` is patched for the first time: vLLM may load plugins more than once in a process."""
    if name in _PATCHED:
        return False
    _PATCHED.add(name)
    return True


class Installed(NamedTuple):
    """The vLLM of this process."""

    version: str
    root: Path


@seam(checked=CHECKED, ends="never: every engine has a version")
def installed() -> Installed:
    """Version (without local part) and package folder."""
    import vllm

    return Installed(vllm.__version__.split("+")[0], Path(vllm.__file__).parent)


@seam(
    checked=CHECKED,
    ends="vLLM shows log lines of other packages",
    demands=(Demand(file="logger.py", name="init_logger", accepts=("name",)),),
)
def logger() -> logging.Logger:
    """A logger below vLLM's own, because vLLM configures only that tree."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.sparse_mla")  # type: ignore[no-any-return]


@seam(
    checked=CHECKED,
    ends="vLLM asks out-of-tree backends when its own refuse",
    demands=(
        Demand(
            file="platforms/cpu.py",
            name="CpuPlatform.get_attn_backend_cls",
            accepts=("selected_backend", "attn_selector_config", "num_heads"),
            mentions=("attn_selector_config.use_sparse", "NotImplementedError"),
        ),
        Demand(
            file="v1/attention/selector.py",
            name="_cached_get_attn_backend",
            mentions=("current_platform.get_attn_backend_cls", "attn_selector_config=", "resolve_obj_by_qualname"),
        ),
        Demand(
            file="v1/attention/selector.py",
            name="AttentionSelectorConfig",
            mentions=("use_mla", "use_sparse", "kv_cache_dtype", "use_kv_connector", "use_pcp", "use_dcp"),
        ),
    ),
)
def hook_backend_choice(choose: Callable[[Callable[[], str], str | None], str]) -> None:
    """Let ``choose(native, asked_for)`` answer for sparse MLA layers; all others go straight to vLLM.

    ``native()`` is vLLM's own choice (a class path) or its error; ``asked_for`` the name of an explicit backend.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    native = platform.get_attn_backend_cls
    if not first_time("get_attn_backend_cls"):
        return

    @functools.wraps(native.__func__)
    def get_attn_backend_cls(
        cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any
    ) -> str:
        def ask_vllm() -> str:
            return native.__func__(cls, selected_backend, attn_selector_config, *args, **kwargs)  # type: ignore[no-any-return]

        if not (getattr(attn_selector_config, "use_sparse", False) and getattr(attn_selector_config, "use_mla", False)):
            return ask_vllm()
        return choose(ask_vllm, getattr(selected_backend, "name", None))

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


@seam(
    checked=CHECKED,
    ends="vLLM's CPU platform judges chunked prefill by the backend that serves",
    demands=(
        Demand(
            file="platforms/cpu.py",
            name="CpuPlatform.check_and_update_config",
            accepts=("vllm_config",),
            mentions=(
                "vllm_config.scheduler_config.enable_chunked_prefill",
                "vllm_config.cache_config.enable_prefix_caching",
                "vllm_config.scheduler_config.max_num_batched_tokens",
                "cache_config.user_specified_block_size",
            ),
        ),
        Demand(
            file="config/vllm.py",
            name="VllmConfig.__post_init__",
            mentions=("current_platform.check_and_update_config",),
        ),
        Demand(file="config/attention.py", name="AttentionConfig", mentions=("backend",)),
    ),
)
def hook_engine_config(serves: Callable[[str | None, str | None], bool]) -> None:
    """Where ``serves(model_type, asked_for)``, undo what the CPU platform sets for its own dense MLA.

    Without AMX the platform switches chunked prefill and prefix caching off for every MLA model and forces 16-token
    blocks, because its dense MLA kernel needs that. And ``ops.rotary_embedding`` on CPU rotates the wrong values when
    query or key have three dimensions, as in MLA with default rope; PyTorch's own path is right.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    native = platform.check_and_update_config
    if platform.device_type != "cpu" or not first_time("check_and_update_config"):
        return

    @functools.wraps(native.__func__)
    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        asked_for = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
        if not serves(_model_type(vllm_config), getattr(asked_for, "name", None)):
            native.__func__(cls, vllm_config)
            return
        wanted = _Limits.of(vllm_config)
        native.__func__(cls, vllm_config)
        wanted.restore(vllm_config)
        custom_ops = vllm_config.compilation_config.custom_ops
        if "+rotary_embedding" not in custom_ops and "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")

    platform.check_and_update_config = classmethod(check_and_update_config)


def _model_type(vllm_config: Any) -> str | None:
    model = vllm_config.model_config
    return getattr(getattr(model, "hf_config", None), "model_type", None)


@seam(checked=CHECKED, ends="never: an engine has a model")
def current_model_type() -> str | None:
    """``model_type`` of the model that is being built in this process."""
    from vllm.config import get_current_vllm_config

    return _model_type(get_current_vllm_config())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """What the user, or vLLM's general defaults, asked of the scheduler and the cache."""

    chunked_prefill: bool
    max_num_batched_tokens: int
    prefix_caching: bool
    block_size: int | None

    @classmethod
    def of(cls, vllm_config: Any) -> _Limits:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        return cls(
            chunked_prefill=scheduler.enable_chunked_prefill,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            prefix_caching=cache.enable_prefix_caching,
            block_size=cache.block_size if cache.user_specified_block_size else None,
        )

    def restore(self, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        scheduler.enable_chunked_prefill = self.chunked_prefill
        scheduler.max_num_batched_tokens = self.max_num_batched_tokens
        cache.enable_prefix_caching = self.prefix_caching
        if self.block_size is not None:
            cache.block_size = self.block_size


@seam(
    checked=CHECKED,
    ends="vLLM takes backend names from entry points",
    demands=(
        Demand(
            file="v1/attention/backends/registry.py", name="AttentionBackendEnum.register", accepts=("name", "value")
        ),
    ),
)
def backend_name() -> Any:
    """Make ``--attention-backend SPARSE_MLA`` a name that vLLM knows; returns the member of its enumeration.

    A member made at run time pickles by a value that a fresh worker process does not know yet, so ours pickles as a
    call of this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if BACKEND_NAME in AttentionBackendEnum.__members__:
        return AttentionBackendEnum[BACKEND_NAME]
    member = AttentionBackendEnum.register(BACKEND_NAME, BACKEND_PATH)
    member.__reduce_ex__ = lambda _protocol: (backend_name, ())
    return member


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """The facts of one engine that decide what ours must do.

    Attributes:
        fields: the model's Hugging Face config.
        dtype: torch dtype of the activations.
        fp8: short name of the platform's fp8 encoding.
    """

    fields: dict[str, Any]
    dtype: torch.dtype
    fp8: str
    device: torch.device
    kv_cache_dtype: str
    mixed_kv_cache: bool
    block_size: int
    max_num_tokens: int
    max_num_requests: int
    max_model_len: int
    tensor_parallel: int
    decode_context_parallel: int
    prefill_context_parallel: int
    kv_connector: str | None
    batch_invariant: bool


@seam(
    checked=CHECKED,
    ends="never: an engine has a configuration",
    demands=(
        Demand(file="config/vllm.py", name="get_current_vllm_config"),
        Demand(file="config/scheduler.py", name="SchedulerConfig", mentions=("max_num_batched_tokens", "max_num_seqs")),
        Demand(
            file="config/cache.py",
            name="CacheConfig",
            mentions=("cache_dtype", "block_size", "kv_cache_dtype_skip_layers"),
        ),
        Demand(
            file="config/parallel.py",
            name="ParallelConfig",
            mentions=("tensor_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"),
        ),
        Demand(file="config/kv_transfer.py", name="KVTransferConfig", mentions=("kv_connector",)),
        Demand(file="platforms/interface.py", name="Platform.is_fp8_fnuz"),
    ),
)
def current_engine() -> Engine:
    """Facts of the engine whose model is being built in this process."""
    import torch
    from vllm import envs
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    config = get_current_vllm_config()
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    return Engine(
        fields=config.model_config.hf_config.to_dict(),
        dtype=config.model_config.dtype,
        fp8="fp8fnuz" if current_platform.is_fp8_fnuz() else "fp8",
        device=torch.device(current_platform.device_type),
        kv_cache_dtype=config.cache_config.cache_dtype,
        mixed_kv_cache=bool(config.cache_config.kv_cache_dtype_skip_layers),
        block_size=config.cache_config.block_size,
        max_num_tokens=config.scheduler_config.max_num_batched_tokens,
        max_num_requests=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
        tensor_parallel=parallel.tensor_parallel_size,
        decode_context_parallel=parallel.decode_context_parallel_size,
        prefill_context_parallel=parallel.prefill_context_parallel_size,
        kv_connector=None if transfer is None else transfer.kv_connector,
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


LATENT_FORMATS: dict[str, str] = {
    "auto": "plain rows in the activations' dtype",
    "bfloat16": "plain bf16 rows",
    "float16": "plain f16 rows",
    "fp8_ds_mla": "656-byte rows",
}
"""Which ``kv_cache_dtype`` gives which latent format. Index keys: see SPARSE_MLA_INDEX_KEYS."""


@seam(
    checked=CHECKED,
    ends="never: names of vLLM's cache dtypes",
    demands=(
        Demand(file="config/cache.py", mentions=("CacheDType",)),
        Demand(file="utils/torch_utils.py", name="kv_cache_dtype_str_to_dtype", accepts=("kv_cache_dtype",)),
        Demand(
            file="model_executor/layers/attention/mla_attention.py",
            name="MLAAttention.get_kv_cache_spec",
            mentions=("state_content_bytes=", "self.kv_cache_dtype", "self.head_size"),
        ),
    ),
)
def latent_format(engine: Engine, dims: MLADims) -> CacheFormat | None:
    """The format of the latent cache that vLLM allocates for an unknown backend, None where ours cannot use it.

    ``fp8`` and ``fp8_e4m3`` stand for one scale per tensor there, not for ``fp8_ds_mla``.
    """
    dtype = {"auto": dtype_name(engine.dtype), "bfloat16": "bf16", "float16": "f16"}.get(engine.kv_cache_dtype)
    if dtype is not None:
        return plain(dims.head_dim, dtype)
    if engine.kv_cache_dtype == "fp8_ds_mla" and (dims.kv_lora_rank, dims.qk_rope_head_dim) == (512, 64):
        return fp8_ds_mla(encoding=engine.fp8)
    return None


@seam(
    checked=CHECKED,
    ends="never: a model has named layers",
    demands=(Demand(file="config/compilation.py", name="CompilationConfig", mentions=("static_forward_context",)),),
)
def layer_names() -> Mapping[str, object]:
    """Names of the layers of this worker: filled while the model is built, so keep it and read it afterwards."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().compilation_config.static_forward_context  # type: ignore[no-any-return]


def indexers_built(names: Iterable[str]) -> dict[int, bool]:
    """Layer number -> whether it was built with an indexer of its own, by the names that ``deepseek_v2`` gives."""
    built: dict[int, bool] = {}
    for name in names:
        parts = name.split(".")
        if "layers" in parts and name.endswith((".attn", ".indexer.k_cache")):
            number = int(parts[parts.index("layers") + 1])
            built[number] = built.get(number, False) or name.endswith(".k_cache")
    return built
