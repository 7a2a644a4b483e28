"""``sparse-mla plan``: the bytes, before starting."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import footprint
from ..cache import fp8_ds_mla, index_fp8, plain
from ..device import KNOWN, Device
from ..dims import MLADims, read_config
from ..errors import UsageError
from ..plan import make_plan
from ..problem import Problem
from .render import console, emit_json, human_bytes, table

if TYPE_CHECKING:
    import argparse

    from ..plan import Plan

SUMMARY = "say what a model needs on each device, by byte, before anything starts"
SCHEMA = "sparse-mla/plan/1"


def configure(parser: argparse.ArgumentParser) -> None:
    """Flags are named as vLLM names them."""
    parser.add_argument("--model", required=True, type=Path, help="model folder or config.json")
    parser.add_argument("--device", default="cpu", choices=KNOWN, metavar="ARCH", help=" ".join(KNOWN))
    parser.add_argument("--memory-gib", type=float, help="memory of one device; without it nothing is said about fit")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share that the engine may use")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8_ds_mla"))
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--vllm", default="0.32.0", metavar="VERSION", help="version of the native path compared with")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a memory was given and a pipeline stage does not fit, or a stage would start without indices."""
    result = report(args)
    if args.format == "json":
        emit_json(result)
    elif args.format == "human":
        show(result)
    return 0 if result["ok"] else 1


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The whole answer as plain data."""
    for name, value in (("--tp", args.tp), ("--pp", args.pp)):
        if not 1 <= value <= 4096:
            raise UsageError(name, needs="1 to 4096", got=value)
    fields = read_config(args.model)
    dims = MLADims.from_config(fields, tensor_parallel=args.tp)
    if args.pp > dims.num_layers:
        raise UsageError("--pp", needs=f"at most {dims.num_layers}, the number of layers", got=args.pp)
    device = Device.named(args.device)
    plan = make_plan(_problem(args, dims, device), device, assume_installed=True)
    engine = footprint.Engine(
        tensor_parallel=args.tp,
        pipeline_parallel=args.pp,
        max_num_tokens=args.max_num_batched_tokens,
        max_num_requests=args.max_num_seqs,
        max_model_len=args.max_model_len,
        vllm_version=args.vllm,
    )
    native = footprint.native_reservations(engine, dims, device, plan.problem.latent.name)
    folder = args.model if args.model.is_dir() else args.model.parent
    stages = [
        _stage(args, fields, plan, folder, layers, native) for layers in footprint.stages(dims.num_layers, args.pp)
    ]
    orphans = footprint.stages_without_indices(dims, args.pp)
    findings = [
        {
            "id": "stage-without-indices",
            "severity": "error",
            "evidence": f"pipeline stage {stage} starts on a layer that reuses indices of an earlier stage",
            "fix": "set VLLM_PP_LAYER_PARTITION so that each stage starts on a layer with an indexer",
        }
        for stage in orphans
    ]
    findings += [finding for stage in stages for finding in stage.pop("findings")]
    return {"schema": SCHEMA, "ok": not findings, **plan.describe(), "stages_of_pipeline": stages, "findings": findings}


def _problem(args: argparse.Namespace, dims: MLADims, device: Device) -> Problem:
    encoding = device.fp8 or "fp8"
    is_ds_mla = args.kv_cache_dtype == "fp8_ds_mla"
    return Problem(
        dims=dims,
        dtype="bf16",
        latent=fp8_ds_mla(dims.kv_lora_rank, dims.qk_rope_head_dim, encoding=encoding)
        if is_ds_mla
        else plain(dims.head_dim, "bf16"),
        index=index_fp8(dims.index_head_dim, encoding=encoding),
        latent_block_size=args.block_size,
        index_block_size=args.block_size,
        max_num_tokens=args.max_num_batched_tokens,
        max_num_requests=args.max_num_seqs,
        max_model_len=args.max_model_len,
    )


def _stage(
    args: argparse.Namespace,
    fields: dict[str, Any],
    plan: Plan,
    folder: Path,
    layers: range,
    native: list[footprint.Item],
) -> dict[str, Any]:
    weights = footprint.weight_bytes(fields, folder, args.tp, layers)
    per_token = footprint.cache_bytes_per_token(plan, layers)
    topk_buffer = args.max_num_batched_tokens * plan.problem.dims.index_topk * 4
    stage: dict[str, Any] = {
        "layers": [layers.start, layers.stop],
        "weights_bytes": weights.nbytes,
        "weights_source": weights.source,
        "weights_format": _weights_format(plan.device, fields),
        "cache_bytes_per_token": per_token,
        "scratch_bytes": plan.scratch_bytes,
        "topk_buffer_bytes": topk_buffer,
        "native_reservations": [{"name": item.name, "bytes": item.nbytes, "source": item.source} for item in native],
        "findings": [],
    }
    if args.memory_gib is None:
        return stage
    usable = int(args.memory_gib * (1 << 30) * args.gpu_memory_utilization)
    fixed = plan.scratch_bytes + topk_buffer
    tokens = footprint.fit(usable, weights.nbytes + fixed, per_token)
    stage["tokens_that_fit"] = max(tokens, 0)
    if tokens < args.max_model_len:
        missing = (args.max_model_len - tokens) * per_token
        wanted = fixed + args.max_model_len * per_token
        shorter = f", or --max-model-len {tokens}" if tokens > 0 else ""
        stage["findings"].append(
            {
                "id": "does-not-fit",
                "severity": "error",
                "evidence": f"layers {layers.start} to {layers.stop - 1}: {max(tokens, 0)} tokens fit beside the weights, "
                f"--max-model-len is {args.max_model_len}; {missing} bytes are missing",
                "fix": f"{_more_devices(args, fields, folder, layers, usable - wanted)}, or another quantisation{shorter}",
            }
        )
    return stage


def _more_devices(args: argparse.Namespace, fields: dict[str, Any], folder: Path, layers: range, room: int) -> str:
    """Tensor parallelism splits the weights; the caches and the scratch stay whole on every rank."""
    heads = int(fields["num_attention_heads"])
    for tp in (size for size in range(args.tp + 1, heads + 1) if heads % size == 0):
        if footprint.weight_bytes(fields, folder, tp, layers).nbytes <= room:
            return f"{tp - args.tp} more device{'s' if tp - args.tp > 1 else ''} for these layers (--tp {tp})"
    return "more pipeline stages (a larger --pp)"


def _weights_format(device: Device, fields: dict[str, Any]) -> str:
    """What the checkpoint's quantisation asks of the device. Kernels are the engine's: nothing here was run."""
    method = (fields.get("quantization_config") or {}).get("quant_method")
    if method is None:
        return "not quantised"
    if method == "fp8":
        return f"fp8: {device.arch} has {'fp8' if device.fp8 else 'no fp8'} matrix units; kernels not checked"
    return f"{method}: not checked on {device.arch}"


def show(result: dict[str, Any]) -> None:
    """Tables for people."""
    out = console()
    rows = [
        (stage, fact["backend"], fact["mode"], human_bytes(fact["scratch_bytes"]))
        for stage, fact in result["stages"].items()
    ]
    out.print(
        table(
            f"Stages on {result['device']}, index_topk {result['index_topk']}",
            ("stage", "backend", "mode", "scratch"),
            rows,
        )
    )
    for stage in result["stages_of_pipeline"]:
        first, last = stage["layers"]
        facts = [
            ("weights of one rank", stage["weights_bytes"], stage["weights_source"]),
            ("cache, one token, all layers", stage["cache_bytes_per_token"], "exact"),
            ("scratch, reserved while profiling", stage["scratch_bytes"], "exact"),
            ("selected indices", stage["topk_buffer_bytes"], "allocated by vLLM"),
            *(
                (f"vLLM's own path: {item['name']}", item["bytes"], item["source"])
                for item in stage["native_reservations"]
            ),
        ]
        rows = [(name, nbytes, human_bytes(nbytes), source) for name, nbytes, source in facts]
        out.print()
        out.print(stage["weights_format"], markup=False)
        out.print(table(f"Layers {first} to {last - 1}, one rank", ("what", "bytes", "", "source"), rows))
        if "tokens_that_fit" in stage:
            out.print(f"tokens that fit: {stage['tokens_that_fit']}")
    for finding in result["findings"]:
        out.print(f"{finding['severity']}: {finding['evidence']}. {finding['fix']}", markup=False)
