from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.dims import MLADims, indexer_schedule, read_config
from sparse_mla.errors import ConfigError

CONFIG = {
    "model_type": "glm_moe_dsa",
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def test_a_rank_of_the_model():
    dims = MLADims.from_config(CONFIG, tensor_parallel=4)
    assert dims.num_heads == 16
    assert dims.index_n_heads == 32  # replicated, not divided
    assert dims.head_dim == 576
    assert dims.num_layers == 6
    assert dims.owns_indexer == (True,) * 6
    assert dims.softmax_scale == pytest.approx(1 / 16)


def test_the_config_that_transformers_makes():
    transformers = pytest.importorskip("transformers")
    dims = MLADims.from_config(transformers.GlmMoeDsaConfig().to_dict())
    assert (dims.index_topk, dims.num_layers, dims.kv_lora_rank) == (2048, 78, 512)


def test_index_topk_defaults_to_what_transformers_fills_in():
    fields = {key: value for key, value in CONFIG.items() if key != "index_topk"}
    assert MLADims.from_config(fields).index_topk == 2048


@pytest.mark.parametrize("model_type", [None, "llama", "deepseek_v3", "glm_moe", 7, ["glm_moe_dsa"]])
def test_another_model_is_refused(model_type):
    with pytest.raises(ConfigError, match="needs glm_moe_dsa or deepseek_v32"):
        MLADims.from_config({**CONFIG, "model_type": model_type})


@pytest.mark.parametrize("key", [key for key in CONFIG if key not in {"model_type", "index_topk"}])
def test_a_missing_size_is_named(key):
    with pytest.raises(ConfigError, match=f"config key {key}.*got None"):
        MLADims.from_config({name: value for name, value in CONFIG.items() if name != key})


@pytest.mark.parametrize("key", [key for key in CONFIG if key != "model_type"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "64", True, [64], 1 << 21, float("nan")])
def test_an_absurd_size_is_named_with_its_value(key, value):
    if key == "qk_rope_head_dim" and value == 0:
        assert MLADims.from_config({**CONFIG, key: 0}).head_dim == 512
        return
    with pytest.raises(ConfigError) as caught:
        MLADims.from_config({**CONFIG, key: value})
    assert f"config key {key}" in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("tensor_parallel", [0, -1, 3, 128])
def test_heads_that_do_not_divide(tensor_parallel):
    with pytest.raises(ConfigError, match=f"TP = {tensor_parallel}, got 64"):
        MLADims.from_config(CONFIG, tensor_parallel=tensor_parallel)


def test_a_folder_a_file_and_a_mapping_are_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    expected = MLADims.from_config(CONFIG)
    assert MLADims.from_config(tmp_path) == expected
    assert MLADims.from_config(str(tmp_path / "config.json")) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[1, 2]", "needs a JSON object, got list"),
        (b"3", "needs a JSON object, got int"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_an_unreadable_config_is_one_line(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_missing_and_a_huge_config(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*Give a model folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json \(No such file"):
        read_config(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ConfigError, match="too large"):
        read_config(tmp_path)


def schedule(layers=8, **fields):
    return "".join("F" if own else "S" for own in indexer_schedule({"num_hidden_layers": layers, **fields}))


def test_every_layer_owns_an_indexer_unless_the_config_says_otherwise():
    assert schedule() == "FFFFFFFF"


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"index_topk_freq": 1}, "FFFFFFFF"),
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, "FSSSFSSS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, "FFFSFSFS"),
        ({"index_topk_pattern": "FSSFSSFS"}, "FSSFSSFS"),
        ({"index_topk_pattern": "FSSFSSFSFFFF"}, "FSSFSSFS"),
        ({"index_topk_pattern": "FSSFSSFS", "index_topk_freq": 7}, "FSSFSSFS"),
        ({"indexer_types": ["full", "shared"] * 4}, "FSFSFSFS"),
        ({"indexer_types": ["full", "shared"] * 4, "index_topk_pattern": "FSFSFSFS"}, "FSFSFSFS"),
        (
            {"indexer_types": ["full"] * 2 + ["shared"] * 3 + ["full"] + ["shared"] * 2, "index_topk_freq": 4},
            "FFSSSFSS",
        ),
    ],
)
def test_the_three_ways_to_state_a_schedule(fields, wanted):
    assert schedule(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"indexer_types": ["full"] * 8, "index_topk_freq": 4},
            "indexer_types and index_topk_freq disagree at layer 2",
        ),
        ({"indexer_types": ["full"] * 8, "index_topk_pattern": "FFFFFFFS"}, "disagree at layer 7"),
        ({"indexer_types": ["shared"] + ["full"] * 7}, "layer 0: needs an indexer of its own, got shared"),
        ({"index_topk_pattern": "SFFFFFFF"}, "layer 0"),
        ({"indexer_types": ["full"] * 7}, "needs 8 layers, got 7"),
        ({"index_topk_pattern": "F"}, "needs 8 layers, got 1"),
        ({"indexer_types": ["full", "none"] * 4}, "only full and shared"),
        ({"index_topk_pattern": "FSXFFFFF"}, "only F and S"),
        ({"index_topk_pattern": 5}, "only F and S, got 5"),
        ({"indexer_types": {"full": 1}}, "only full and shared"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": -1}, "index_skip_topk_offset"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "layer 0"),
    ],
)
def test_a_schedule_that_cannot_be_trusted_is_refused(fields, said):
    with pytest.raises(ConfigError) as caught:
        schedule(**fields)
    assert said in str(caught.value)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 5))
def test_frequency_and_types_agree_when_one_is_written_from_the_other(layers, freq, offset):
    fields = {"index_topk_freq": freq, "index_skip_topk_offset": offset}
    letters = schedule(layers, **fields)
    types = ["full" if letter == "F" else "shared" for letter in letters]
    assert schedule(layers, indexer_types=types, **fields) == letters
    assert letters[0] == "F"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from([*CONFIG, "indexer_types", "index_topk_pattern", "index_topk_freq"]), JSON_VALUES)
)
def test_any_json_gives_dims_or_one_clear_error(changes):
    said = ""
    try:
        said = str(MLADims.from_config({**CONFIG, **changes, "num_hidden_layers": 6}))
    except ConfigError as error:
        said = str(error)
    assert said
    assert "\n" not in said
