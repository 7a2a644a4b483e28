"""Compile kernels for architectures that are not here, and read what the compiled objects need."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.errors import TritonError

from sparse_mla.backends.triton import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparse_mla.device import Device

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint64: "*u64",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}
_WARP = {"gfx942": 64, "gfx950": 64}


@dataclass(frozen=True)
class Launch:
    """A kernel with the types and the compile-time values that a launch would give it."""

    kernel: Any
    signature: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


class CannotCompileError(Exception):
    """A kernel that Triton cannot compile for an architecture; the compiler's own words."""


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: bytes of shared memory (LDS) of a program, registers of a thread, spilled bytes."""

    shared_bytes: int
    registers: int
    spilled_bytes: int


def record(call: Callable[[], None]) -> list[Launch]:
    """The launches that ``call`` would make, without making them; duplicates once."""
    found: dict[Launch, None] = {}

    def note(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        meta = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if name in options}
        constants = {name: value for name, value in options.items() if name not in meta}
        signature = tuple(_type(arg) for arg in args)
        found[Launch(kernel, signature, tuple(constants.items()), tuple(meta.items()))] = None

    started, launch.start = launch.start, note
    try:
        call()
    finally:
        launch.start = started
    return list(found)


def _type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return _POINTERS[arg.dtype]
    return "fp32" if isinstance(arg, float) else "i32"


def compile_for(wanted: Launch, device: Device) -> Resources:
    """Compile through Triton's own target for ``device.arch`` and read the object.

    Raises:
        CannotCompileError: it does not compile.
    """
    compiled = compiled_for(wanted, device)
    if device.kind == "rocm":
        return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _nvidia(compiled.asm["cubin"], compiled.metadata.shared)


def compiled_for(wanted: Launch, device: Device) -> Any:
    """Triton's compiled kernel with all that it went through, ``asm["ptx"]`` or ``asm["amdgcn"]`` among it."""
    names = wanted.kernel.arg_names
    constants = dict(wanted.constants)
    signature = dict(zip(names, wanted.signature, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = [kind.startswith("*") for kind in wanted.signature]
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, (known, parameter) in enumerate(zip(aligned, wanted.kernel.params, strict=False))
        if known and not parameter.do_not_specialize_on_alignment
    }
    source = ASTSource(wanted.kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    try:
        return triton.compile(source, target=target_of(device), options=dict(wanted.options))
    except (CompilationError, TritonError, RuntimeError) as error:
        raise CannotCompileError(str(error)[-400:]) from error


def target_of(device: Device) -> GPUTarget:
    """Triton's name of an architecture."""
    if device.kind == "rocm":
        return GPUTarget("hip", device.arch, _WARP.get(device.arch, 32))
    return GPUTarget("cuda", int(device.arch.removeprefix("sm")), 32)


def _nvidia(cubin: bytes, shared: int) -> Resources:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers = int(re.search(r"REG:(\d+)", text)[1])
    stack, local = (int(re.search(rf"{what}:(\d+)", text)[1]) for what in ("STACK", "LOCAL"))
    return Resources(shared, registers, stack + local)


def _amd(assembly: str, shared: int) -> Resources:
    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s*(\d+)", assembly)
        return int(match[1]) if match else 0

    vectors = number("vgpr_count")
    return Resources(shared, vectors, number("private_segment_fixed_size"))
