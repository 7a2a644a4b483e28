"""Runs the installed vLLM's own backend selection with a fake capability. Started as a child process with a time limit by
``child.py``, never imported: what it loads may hang, crash or print. Reads a request from stdin, prints one JSON line.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from types import SimpleNamespace
from typing import Any

MARK = "SPARSE-MLA-ANSWER "
# Compiled parts that a build for another kind of device does not have: the selection code only imports them.
_COMPILED = ("vllm._C_stable_libtorch", "vllm._C", "vllm._rocm_C", "vllm._moe_C", "amdsmi")


def main() -> None:
    """One request on stdin, one answer on stdout."""
    request = json.load(sys.stdin)
    for name in _COMPILED:
        _stand_in(name)
    answer = _rocm(request) if request["vendor"] == "amd" else _cuda(request)
    print(MARK + json.dumps(answer), flush=True)


def _stand_in(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:  # noqa: BLE001  # whatever is wrong with it: an empty module is enough here
        sys.modules[name] = types.ModuleType(name)


def _config(request: dict[str, Any], torch: Any) -> Any:
    selector = importlib.import_module("vllm.v1.attention.selector")
    run = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**request["model"]),
            hf_config=SimpleNamespace(**request["model"]),
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=request["dcp"], prefill_context_parallel_size=1),
    )
    config = importlib.import_module("vllm.config")
    for name in ("get_current_vllm_config", "get_current_vllm_config_or_none"):
        if hasattr(config, name):
            setattr(config, name, lambda: run)
    fields = {
        "head_size": request["head_size"],
        "dtype": getattr(torch, request["dtype"]),
        "kv_cache_dtype": request["kv_cache_dtype"],
        "block_size": request["block_size"],
        "use_mla": True,
        "use_sparse": True,
        "use_dcp": request["dcp"] > 1,
    }
    known = selector.AttentionSelectorConfig._fields
    return selector.AttentionSelectorConfig(**{name: value for name, value in fields.items() if name in known})


def _cuda(request: dict[str, Any]) -> list[dict[str, Any]]:
    torch = importlib.import_module("torch")
    config = _config(request, torch)
    cuda = importlib.import_module("vllm.platforms.cuda")
    interface = importlib.import_module("vllm.platforms.interface")
    capability = interface.DeviceCapability(*divmod(request["sm"], 10))
    offered = {"use_mla": True, "device_capability": capability, "num_heads": request["num_heads"]}
    offered |= {"kv_cache_dtype": request["kv_cache_dtype"], "head_size": request["head_size"]}
    priorities = cuda._get_backend_priorities  # noqa: SLF001  # the code whose answer is asked for
    plain = getattr(priorities, "__wrapped__", priorities)
    names = plain.__code__.co_varnames[: plain.__code__.co_argcount]
    return _ask(priorities(**{name: offered[name] for name in names if name in offered}), capability, config)


def _rocm(request: dict[str, Any]) -> list[dict[str, Any]]:
    torch = importlib.import_module("torch")
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(gcnArchName=request["arch"])
    config = _config(request, torch)
    rocm = importlib.import_module("vllm.platforms.rocm")
    interface = importlib.import_module("vllm.platforms.interface")
    major = int(request["arch"][3:-2] or 0)
    capability = interface.DeviceCapability(major, int(request["arch"][-2:-1], 16))
    return _ask(rocm._get_backend_priorities(True, True), capability, config)  # noqa: SLF001


def _ask(backends: Any, capability: Any, config: Any) -> list[dict[str, Any]]:
    return [_ask_one(backend, capability, config) for backend in backends]


def _ask_one(backend: Any, capability: Any, config: Any) -> dict[str, Any]:
    try:
        reasons = backend.get_class().validate_configuration(device_capability=capability, **config._asdict())
    except Exception as error:  # noqa: BLE001  # a backend that cannot be imported here is read instead
        return {"name": backend.name, "reasons": [], "failed": f"{type(error).__name__}: {error}"[:200]}
    return {"name": backend.name, "reasons": list(map(str, reasons)), "failed": ""}


if __name__ == "__main__":
    main()
