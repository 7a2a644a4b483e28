"""Model folders are judged before an engine starts."""

from __future__ import annotations

import json
import struct

import pytest

from sparse_mla.errors import ConfigError
from sparse_mla.testing.tiny_model import tiny_config
from sparse_mla.verify.checkpoint import check_safetensors, knows_facts, made_folder, model_folder


def safetensors(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


WHOLE = safetensors({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "__metadata__": {}}, b"abcd")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / "model.safetensors").write_bytes(WHOLE)
    return tmp_path


def test_a_whole_folder_passes(folder):
    found, dims, fields = model_folder(str(folder))
    assert found == folder
    assert dims.index_topk == fields["index_topk"] == 64


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        WHOLE[:-1],
        WHOLE + b"x",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"[1,2",
        safetensors([], b""),
        safetensors({"w": {"dtype": "U8"}}, b""),
        safetensors({"w": {"data_offsets": [0, "four"]}}, b""),
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    ],
    ids=[
        "empty",
        "7-bytes",
        "cut",
        "longer",
        "huge-header",
        "bad-json",
        "list",
        "no-offsets",
        "odd-offsets",
        "pointer",
    ],
)
def test_corrupt_weights_are_one_line(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors") as caught:
        model_folder(str(folder))
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-2.safetensors"}}))
    with pytest.raises(ConfigError, match=r"model-2\.safetensors"):
        model_folder(str(folder))


def test_a_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no weights"):
        model_folder(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_folder(str(folder))


def test_a_model_that_is_not_dsa_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="llama"):
        model_folder(str(folder))


def test_tiny_is_made_once_and_made_again_when_spoiled(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    folder = made_folder("tiny")
    weights = folder / "model.safetensors"
    check_safetensors(weights)
    first = weights.stat().st_mtime_ns
    assert made_folder("tiny") == folder
    assert weights.stat().st_mtime_ns == first
    (folder / "config.json").write_text(json.dumps(tiny_config(index_topk=32)))
    made_folder("tiny")
    assert json.loads((folder / "config.json").read_text()) == tiny_config()
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_retrieval_is_made_and_known_to_repeat_facts_and_tiny_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path))
    folder, dims, _ = model_folder("retrieval")
    assert (folder.parent, dims.index_topk) == (tmp_path, 512)
    assert knows_facts(folder)
    assert not knows_facts(made_folder("tiny"))
    (folder / "endpoint-style.json").write_text('{"ask": "each"}')
    assert not knows_facts(folder)


def test_a_cache_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(blocked))
    with pytest.raises(ConfigError, match="SPARSE_MLA_CACHE_DIR"):
        made_folder("tiny")
