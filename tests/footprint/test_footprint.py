from __future__ import annotations

import json
import struct

import pytest
import torch

from sparse_mla import footprint
from sparse_mla.attention import SparseMLA
from sparse_mla.cache import fp8_ds_mla, index_fp8, plain
from sparse_mla.cli.main import main
from sparse_mla.device import Device
from sparse_mla.dims import MLADims
from sparse_mla.errors import ConfigError
from sparse_mla.plan import make_plan
from sparse_mla.problem import Problem
from sparse_mla.workspace import ALIGN, Workspace

GLM = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "quantization_config": {"quant_method": "fp8"},
}


def plan_of(fields, *, latent=None, topk=2048, context=4096):
    dims = MLADims.from_config({**fields, "index_topk": topk}, tensor_parallel=4)
    problem = Problem(
        dims=dims,
        dtype="bf16",
        latent=latent or plain(576, "bf16"),
        index=index_fp8(128),
        latent_block_size=64,
        index_block_size=64,
        max_num_tokens=256,
        max_num_requests=4,
        max_model_len=context,
    )
    return make_plan(problem, Device.named("cpu"))


@pytest.mark.parametrize(("latent", "row"), [(plain(576, "bf16"), 1152), (fp8_ds_mla(), 656)])
def test_both_caches_of_every_layer_are_counted(latent, row):
    assert footprint.cache_bytes_per_token(plan_of(GLM, latent=latent), range(78)) == 78 * (row + 132)


def test_a_layer_that_shares_indices_has_no_index_cache():
    plan = plan_of({**GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3})
    owners = sum(plan.problem.dims.owns_indexer)
    assert 0 < owners < 78
    assert footprint.cache_bytes_per_token(plan, range(78)) == 78 * 1152 + owners * 132


def test_scratch_is_what_the_allocator_gives():
    plan = plan_of(GLM, context=1000)
    workspace = Workspace()
    SparseMLA(plan, workspace)
    assert workspace.nbytes == plan.scratch_bytes
    arena = workspace.views(plan.select.buffers)["keys"].untyped_storage()
    assert arena.nbytes() == plan.scratch_bytes + ALIGN


@pytest.mark.engine
def test_pages_and_pipeline_split_are_those_of_the_installed_engine():
    from vllm.distributed.utils import get_pp_indices
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    for width, dtype, row in ((576, torch.bfloat16, 1152), (132, torch.uint8, 132)):
        spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=width, dtype=dtype)
        assert spec.page_size_bytes == 64 * row
    for size in (1, 3, 4, 5, 7):
        ours = [(part.start, part.stop) for part in footprint.stages(78, size)]
        assert ours == [get_pp_indices(78, rank, size) for rank in range(size)]


def test_counted_weights_agree_with_a_real_model():
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    small = {
        **{key: value for key, value in GLM.items() if key not in {"model_type", "quantization_config"}},
        "num_hidden_layers": 5,
        "hidden_size": 512,
        "vocab_size": 1000,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }
    config = GlmMoeDsaConfig(**small)
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    real = sum(tensor.numel() * 2 for tensor in model.parameters())
    counted = footprint.weight_bytes(config.to_dict(), None, 1, range(5)).nbytes
    assert counted <= real  # norms and biases are not counted
    assert counted == pytest.approx(real, rel=2e-3)


def write_safetensors(file, tensors):
    header, offset = {}, 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def test_weights_are_read_from_headers_and_split_as_the_engine_splits_them(tmp_path):
    tensors = {
        "model.embed_tokens.weight": 80,
        "model.layers.0.self_attn.o_proj.weight": 40,
        "model.layers.0.self_attn.q_a_proj.weight": 7,
        "model.layers.1.mlp.experts.0.up_proj.weight": 16,
        "model.norm.weight": 3,
        "lm_head.weight": 80,
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert footprint.weight_bytes({}, tmp_path, 4, range(2)).nbytes == 20 + 10 + 7 + 4 + 3 + 20
    assert footprint.weight_bytes({}, tmp_path, 4, range(1)).nbytes == 20 + 10 + 7
    assert footprint.weight_bytes({}, tmp_path, 4, range(1, 2)).nbytes == 4 + 3 + 20


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 not a tensor file", struct.pack("<Q", 1 << 60), struct.pack("<Q", 2) + b"[]"]
)
def test_a_corrupt_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        footprint.weight_bytes({}, tmp_path, 1, range(1))


def test_native_reservations_follow_the_version():
    dims = MLADims.from_config(GLM, tensor_parallel=4)
    engine = footprint.Engine(max_num_tokens=8192, max_num_requests=640, max_model_len=1 << 20, vllm_version="0.28.0")
    old = {
        item.name: item.nbytes for item in footprint.native_reservations(engine, dims, Device.named("gfx950"), "plain")
    }
    assert old["scores of a decode step"] == 32 << 30  # the reservation that took a fifth of a KV cache
    new = footprint.Engine(max_num_tokens=8192, max_num_requests=640, max_model_len=1 << 20, vllm_version="0.32.0")
    bounded = {
        item.name: item.nbytes for item in footprint.native_reservations(new, dims, Device.named("gfx950"), "plain")
    }
    assert bounded["scores of a decode step"] == 640 * (1 << 20) * 4
    unknown = footprint.Engine(max_num_tokens=1, max_num_requests=1, max_model_len=1, vllm_version="9.9")
    assert footprint.native_reservations(unknown, dims, Device.named("gfx950"), "plain") == []


@pytest.mark.parametrize(
    ("arch", "latent", "version", "context", "wanted"),
    [
        # 1,152 bytes of a latent are 8 index rows of 132; factor 5, and 2 from 0.32 on beyond 256 Ki tokens.
        ("sm90", "plain", "0.28.0", 1 << 20, {"gather of index keys": (1 << 20) * 8 * 5 * 132}),
        ("sm90", "plain", "0.32.0", 1 << 20, {"gather of index keys": (1 << 20) * 8 * 2 * 132}),
        ("sm90", "plain", "0.32.0", 1 << 18, {"gather of index keys": (1 << 18) * 8 * 5 * 132}),
        (
            "sm90",
            "fp8_ds_mla",
            "0.28.0",
            1 << 17,
            {
                "gather of index keys": (1 << 17) * 8 * 5 * 132,
                "up-converted latents of a prefill": (1 << 17) * 5 * 1152,
            },
        ),
        ("gfx942", "fp8_ds_mla", "0.22.1", 1 << 17, {"gather of index keys": (1 << 17) * 8 * 5 * 132}),
    ],
)
def test_what_a_native_prefill_reserves(arch, latent, version, context, wanted):
    dims = MLADims.from_config(GLM, tensor_parallel=4)
    engine = footprint.Engine(max_num_tokens=8192, max_num_requests=64, max_model_len=context, vllm_version=version)
    items = footprint.native_reservations(engine, dims, Device.named(arch), latent)
    assert {item.name: item.nbytes for item in items if "scores" not in item.name} == wanted


def run_plan(tmp_path, capsys, *flags, fields=GLM):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    code = main(["plan", "--model", str(tmp_path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_plan_says_what_fits(tmp_path, capsys):
    flags = ("--device", "gfx950", "--tp", "4", "--max-model-len", "200000")
    code, result = run_plan(tmp_path, capsys, *flags, "--memory-gib", "288")
    (stage,) = result["stages_of_pipeline"]
    assert (code, stage["cache_bytes_per_token"]) == (0, 100152)
    assert stage["tokens_that_fit"] > 200000
    code, result = run_plan(tmp_path, capsys, *flags, "--memory-gib", "80")
    assert code == 1
    (finding,) = result["findings"]
    assert finding["id"] == "does-not-fit"
    assert "12 more devices for these layers (--tp 16), or another quantisation" in finding["fix"]


def test_as_many_devices_as_the_message_names_are_enough_and_one_size_less_is_not(tmp_path, capsys):
    flags = ("--device", "sm90", "--max-model-len", "200000", "--memory-gib", "141")
    code, result = run_plan(tmp_path, capsys, *flags, "--tp", "4")
    assert code == 1
    assert "4 more devices for these layers (--tp 8)" in result["findings"][0]["fix"]
    assert run_plan(tmp_path, capsys, *flags, "--tp", "8")[0] == 0
    code, result = run_plan(tmp_path, capsys, *flags[:-1], "20", "--tp", "4")
    assert "more pipeline stages" in result["findings"][0]["fix"]


def index_of(tmp_path, files, total):
    tensors = {f"model.layers.{number}.mlp.gate.weight": name for number, name in enumerate(files)}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": tensors})
    (tmp_path / "model.safetensors.index.json").write_text(text)


def test_an_index_without_all_of_its_files_gives_the_total(tmp_path):
    counted = footprint.weight_bytes(GLM, None, 1, range(78)).nbytes
    index_of(tmp_path, ["a.safetensors", "b.safetensors"], 2 * counted)
    whole = footprint.weight_bytes(GLM, tmp_path, 1, range(78))
    assert whole.nbytes == pytest.approx(2 * counted, rel=1e-9)
    assert "0 of 2 files here" in whole.source
    write_safetensors(tmp_path / "a.safetensors", {"model.layers.0.mlp.gate.weight": 64})
    assert footprint.weight_bytes(GLM, tmp_path, 1, range(78)).nbytes == whole.nbytes
    write_safetensors(tmp_path / "b.safetensors", {"lm_head.weight": 128})
    assert footprint.weight_bytes(GLM, tmp_path, 1, range(78)).nbytes == 192


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 7}', "[" * 100_000])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json is not a safetensors index"):
        footprint.weight_bytes(GLM, tmp_path, 1, range(78))


def test_a_draft_layer_in_the_checkpoint_is_not_the_last_one(tmp_path):
    tensors = {"model.layers.1.mlp.gate.weight": 5, "model.layers.2.mlp.gate.weight": 7, "lm_head.weight": 80}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert footprint.weight_bytes({"num_hidden_layers": 2}, tmp_path, 1, range(2)).nbytes == 85


def test_plan_names_a_stage_that_starts_without_indices(tmp_path, capsys):
    fields = {**GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    code, result = run_plan(tmp_path, capsys, "--pp", "8", fields=fields)
    assert code == 1
    assert result["findings"][0]["id"] == "stage-without-indices"
    assert run_plan(tmp_path, capsys, "--pp", "1", fields=fields)[0] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "0"), "--tp"),
        (("--tp", "5"), "a multiple of TP = 5"),
        (("--pp", "79"), "at most 78"),
        (("--max-model-len", "0"), "max_model_len"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, capsys, flags, words):
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    assert main(["plan", "--model", str(tmp_path), *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_human_answer_has_the_same_figures(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    assert main(["plan", "--model", str(tmp_path), "--tp", "4"]) == 0
    assert "100152" in capsys.readouterr().out
