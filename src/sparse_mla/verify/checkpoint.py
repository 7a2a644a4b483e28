"""The model folder of an engine run: checked before anything starts, or made. Reads headers only; needs no torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import envs
from ..dims import MLADims, read_config
from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_HEADER = 1 << 27
MADE = ("tiny", "retrieval")
"""Models that are made here; a folder of such a name is given as ``./tiny``."""


def model_folder(model: str) -> tuple[Path, MLADims, dict[str, Any]]:
    """The folder of ``--model``, its sizes and its config; a name of ``MADE`` is made in the cache folder.

    Raises:
        ConfigError: no config, not DSA, no weights, or a weights file that is not whole.
    """
    folder = made_folder(model) if model in MADE else Path(model)
    fields = read_config(folder)
    dims = MLADims.from_config(fields)
    for file in _weight_files(folder):
        check_safetensors(file)
    return folder, dims, fields


def weight_bytes(folder: Path) -> int:
    """Bytes of all weights files."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def made_folder(name: str) -> Path:
    """A seeded checkpoint of ours, made on first use in SPARSE_MLA_CACHE_DIR; ``name`` is one of ``MADE``.

    ``tiny``: ordinary random weights. ``retrieval``: weights that repeat planted facts.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    from ..testing.retrieval import retrieval_config, write_retrieval_model
    from ..testing.tiny_model import tiny_config, write_tiny_model

    config, write = {
        "tiny": (tiny_config, write_tiny_model),
        "retrieval": (retrieval_config, write_retrieval_model),
    }[name]
    stated = envs.get("SPARSE_MLA_CACHE_DIR")
    folder = (Path(stated) if stated else Path.home() / ".cache" / "sparse-mla") / f"{name}-glm-moe-dsa"
    try:
        whole = (folder / "model.safetensors").is_file() and read_config(folder) == config()
        if not whole:
            write(folder)
    except OSError as error:
        hint = "Set SPARSE_MLA_CACHE_DIR to a folder that can be written to."
        raise ConfigError(f"cannot write {folder} ({error.strerror})", hint=hint) from None
    return folder


def knows_facts(folder: Path) -> bool:
    """Whether the model of a folder repeats planted facts: ``testing.retrieval`` wrote it, and says how to ask it."""
    from ..testing.planted import endpoint_style

    style = folder / "endpoint-style.json"
    return style.is_file() and read_config(style) == endpoint_style()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{folder} has no weights", needs="*.safetensors files")
        return files
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}", needs="a weight_map")
    files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder} has no {missing[0]}", needs="every file that its index names")
    return files


def check_safetensors(file: Path) -> None:
    """Header and size of a safetensors file: 8 bytes of header length, a JSON header, then the tensors' bytes.

    Raises:
        ConfigError: cut short, or not such a file.
    """
    size = file.stat().st_size
    hint = "Download or make it again."
    with file.open("rb") as opened:
        start = opened.read(8)
        (length,) = struct.unpack("<Q", start) if len(start) == 8 else (0,)
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise ConfigError(f"{file} is not a safetensors file, or cut short", hint=hint)
        try:
            header = json.loads(opened.read(length))
            needed = 8 + length + max(_ends(header), default=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ConfigError(f"{file} has no readable header", hint=hint) from None
    if size != needed:
        raise ConfigError(f"{file} is not whole", needs=f"{needed} bytes", got=size, hint=hint)


def _ends(header: Mapping[str, Any]) -> list[int]:
    return [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
