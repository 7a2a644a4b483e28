"""One layer as vLLM calls it, without vLLM: metadata, index cache, latent cache, output, each against the reference."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_facts import engine

from sparse_mla.cache import CacheView, fp8_ds_mla, index_fp8, plain
from sparse_mla.dims import MLADims
from sparse_mla.errors import ConfigError
from sparse_mla.integrations.vllm import layer_seams, seams
from sparse_mla.quantize import quantize_index_q
from sparse_mla.reference.write import decode_rows, encode_row
from sparse_mla.testing.compare import check_attention, check_selection
from sparse_mla.testing.inputs import Prompt, scattered_blocks, slots_for
from sparse_mla.testing.tiny_model import tiny_config

DIMS = MLADims.from_config(tiny_config())
DEFINE, DRAW = layer_seams.define_operator, layer_seams.draw_once_read
BLOCK, PADDING = 16, 5
LENGTHS = (150, 90)
STEPS = ((100, 40), (49, 0), (1, 50))
"""Tokens of each request in each step; the second request skips one."""


class Builder:
    """What vLLM's own builder class does for ours."""

    def __init__(self, *args):
        self.args = args


@pytest.fixture(scope="module")
def plugin():
    """The modules of a layer on stand-ins for vLLM's classes; they are loaded anew and forgotten again."""
    names = ("impl", "indexer", "metadata", "backend")
    paths = [f"sparse_mla.integrations.vllm.{name}" for name in names]
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            patch.delitem(sys.modules, path, raising=False)
        bases = layer_seams.Bases(backend=object, impl=object, builder=Builder, metadata=object)
        patch.setattr(layer_seams, "attention_bases", lambda: bases)
        registered = []
        patch.setattr(layer_seams, "define_operator", lambda *args, **named: registered.append((args, named)))
        patch.setattr(layer_seams, "draw_once_read", lambda: None)
        modules = {name: import_module(path) for name, path in zip(names, paths, strict=True)}
        yield SimpleNamespace(**modules, registered=registered)
        for path in paths:
            patch.delitem(sys.modules, path)


class Layer:
    """One layer with its caches, its indexer, and two requests."""

    def __init__(self, plugin, monkeypatch, **changes):
        facts = engine(**{"block_size": BLOCK, "max_model_len": 512, "max_num_requests": 4} | changes)
        monkeypatch.setattr(seams, "current_engine", lambda: facts)
        monkeypatch.setattr(seams, "layer_names", dict)
        self.taken = []
        monkeypatch.setattr(layer_seams, "take_indexer", lambda *taken: self.taken.append(taken))
        buffer = torch.full((512, DIMS.index_topk), 77, dtype=torch.int32)
        self.cache = SimpleNamespace(prefix="model.layers.0.self_attn.indexer.k_cache", kv_cache=None)
        self.indexer = SimpleNamespace(k_cache=self.cache, topk_indices_buffer=buffer)
        self.impl = plugin.impl.SparseMLAImpl(
            DIMS.num_heads, DIMS.head_dim, DIMS.softmax_scale, 1, topk_indices_buffer=buffer, indexer=self.indexer
        )
        problem = self.impl._runtime.plan.problem
        self.latent, self.index = problem.latent, problem.index
        self.table, blocks = scattered_blocks(LENGTHS, BLOCK, seed=3)
        width = torch.uint8 if self.latent.rule is not None else torch.bfloat16
        self.latent_cache = torch.zeros(blocks, BLOCK, self.latent.row_bytes // width.itemsize, dtype=width)
        self.cache.kv_cache = torch.zeros(blocks, BLOCK, self.cache.head_dim, dtype=self.cache.dtype)
        self.prompts = [Prompt(dims=DIMS, length=length, seed=length) for length in LENGTHS]
        self.builder = plugin.metadata.SparseMLAMetadataBuilder(None, ["layer"], None, torch.device("cpu"))
        self.plugin, self.done = plugin, [0, 0]

    def common(self, counts):
        """vLLM's own metadata of a step, with slots and tokens padded as for a captured graph."""
        ends = [done + count for done, count in zip(self.done, counts, strict=True)]
        slots = [
            slots_for(self.table[row], BLOCK, end - count, end)
            for row, (end, count) in enumerate(zip(ends, counts, strict=True))
        ]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        return SimpleNamespace(
            num_reqs=2,
            num_actual_tokens=sum(counts),
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(ends, dtype=torch.int32),
            seq_lens_cpu_upper_bound=None,
            block_table_tensor=self.table,
            slot_mapping=torch.nn.functional.pad(torch.cat(slots), (0, PADDING), value=-1),
        )

    def rows(self, name, counts, padding=0):
        """The step's rows of both prompts, then NaN."""
        parts = [
            prompt.rows(name, done, done + count)
            for prompt, done, count in zip(self.prompts, self.done, counts, strict=True)
        ]
        whole = torch.cat(parts)
        return torch.cat([whole, torch.full((padding, *whole.shape[1:]), torch.nan, dtype=whole.dtype)])

    def step(self, counts, *, split=False):
        """One engine step of this layer: ``(metadata, indices, output)``."""
        metadata = self.builder.build(0, self.common(counts))
        self.impl.do_kv_cache_update(
            self.rows("kv_c", counts), self.rows("k_pe", counts).unsqueeze(1), self.latent_cache, metadata.slot_mapping
        )
        asked = [self.rows(name, counts, PADDING) for name in ("index_q", "index_k", "index_weights")]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer_seams, "layer_context", lambda name: (metadata, self.cache))
            self.plugin.indexer.vllm_index(*asked, self.indexer.topk_indices_buffer, self.cache.prefix)
        q = self.rows("q", counts)
        asked_as = (q[..., : DIMS.kv_lora_rank], q[..., DIMS.kv_lora_rank :]) if split else q
        layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
        out, lse = self.impl.forward_mqa(asked_as, self.latent_cache, metadata, layer)
        assert lse is None
        return metadata, self.indexer.topk_indices_buffer[: sum(counts)].clone(), out

    def judge(self, counts, indices, out):
        """Bytes, indices and output of the step's last rows by the reference."""
        start = 0
        for row, (done, count) in enumerate(zip(self.done, counts, strict=True)):
            for place in {0, count - 1} if count else ():
                position, at = done + place, start + place
                slots = slots_for(self.table[row], BLOCK, 0, position + 1).tolist()
                self.judge_bytes(row, position, slots[-1])
                keys, scale = decode_rows(CacheView.of(self.cache.kv_cache, self.index), slots)
                query, weights = (
                    self.prompts[row].rows(name, position, position + 1) for name in ("index_q", "index_weights")
                )
                if self.index.rule is not None:
                    query, folded = quantize_index_q(query, self.index.encoding)
                    weights = weights * folded
                assert check_selection(at, indices[at], query[0], weights[0], keys, scale) is None
                chosen = indices[at][indices[at] >= 0]
                latent, _ = decode_rows(
                    CacheView.of(self.latent_cache, self.latent), [slots[index] for index in chosen]
                )
                q = self.prompts[row].rows("q", position, position + 1)[0]
                assert check_attention(at, out[at], None, q, latent, DIMS.softmax_scale) is None
            start += count
        self.done = [done + count for done, count in zip(self.done, counts, strict=True)]

    def judge_bytes(self, row, position, slot):
        """What the reference would have written for a token."""
        kv_c, k_pe, index_k = (
            self.prompts[row].rows(name, position, position + 1)[0] for name in ("kv_c", "k_pe", "index_k")
        )
        for cache, kind, values in (
            (self.latent_cache, self.latent, torch.cat((kv_c, k_pe))),
            (self.cache.kv_cache, self.index, index_k),
        ):
            view = CacheView.of(cache, kind)
            for name, coded in encode_row(values, kind).items():
                stored = view.field(name)[slot // BLOCK, slot % BLOCK].contiguous().view(torch.uint8)
                assert bytes(stored.tolist()) == coded


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("changes", "latent", "index"),
    [
        ({}, plain(576, "bf16"), index_fp8(128)),
        ({"kv_cache_dtype": "fp8_ds_mla"}, fp8_ds_mla(), index_fp8(128)),
        ({}, plain(576, "bf16"), plain(128, "bf16")),
    ],
    ids=["bf16", "fp8", "plain keys"],
)
def test_every_step_agrees_with_the_reference(plugin, monkeypatch, changes, latent, index, split):
    monkeypatch.setenv("SPARSE_MLA_INDEX_KEYS", "fp8" if index.rule else "plain")
    layer = Layer(plugin, monkeypatch, **changes)
    assert (str(layer.latent), str(layer.index)) == (str(latent), str(index))
    for counts in STEPS:
        _, indices, out = layer.step(counts, split=split)
        layer.judge(counts, indices, out)
        assert (layer.indexer.topk_indices_buffer[sum(counts) :] == 77).any()
    assert layer.done == list(LENGTHS)


def test_metadata_routes_every_token_as_decode_and_drops_the_padding(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    metadata = layer.builder.build(0, layer.common((7, 3)))
    assert (metadata.num_actual_tokens, metadata.num_decode_tokens, metadata.num_prefills) == (10, 10, 0)
    assert metadata.num_decodes == 2
    assert metadata.slot_mapping.shape == (10,)
    assert metadata.batch.visible_lens.tolist() == [*range(1, 8), 1, 2, 3]
    assert metadata.trace_requests is None
    assert layer.builder.args[1] == ["layer"]


def test_a_trace_has_every_stage_of_the_layer(plugin, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE_MLA_TRACE", str(tmp_path / "trace"))
    layer = Layer(plugin, monkeypatch)
    for counts in STEPS[:2]:
        metadata, _, _ = layer.step(counts)
        layer.done = [done + count for done, count in zip(layer.done, counts, strict=True)]
        assert metadata.trace_requests == (0, 1)
    trace = import_module("sparse_mla.integrations.vllm.trace").load(Path(tmp_path / "trace"))
    names = {"index_cache": layer.cache.prefix, "selected": layer.cache.prefix}
    names |= dict.fromkeys(("latent_cache", "output"), "model.layers.0.self_attn.attn")
    assert {(layer_name, stage) for _, layer_name, stage in trace} == {(name, stage) for stage, name in names.items()}
    assert {request: len(rows) for (request, _, stage), rows in trace.items() if stage == "output"} == {0: 149, 1: 40}


def test_a_profiling_run_has_no_cache_yet(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    monkeypatch.setattr(layer_seams, "layer_context", lambda _name: (None, layer.cache))
    asked = [layer.rows(name, (2, 2)) for name in ("index_q", "index_k", "index_weights")]
    plugin.indexer.vllm_index(*asked, layer.indexer.topk_indices_buffer, layer.cache.prefix)
    assert (layer.indexer.topk_indices_buffer == 77).all()
    nothing = torch.empty(0, dtype=torch.bfloat16)
    layer.impl.do_kv_cache_update(
        layer.rows("kv_c", (1, 0)), layer.rows("k_pe", (1, 0)), nothing, torch.zeros(1, dtype=torch.int64)
    )


def test_the_indexers_cache_gets_our_rows_our_metadata_and_an_operator(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    assert (layer.cache.head_dim, layer.cache.dtype) == (132, torch.uint8)
    assert layer.cache.get_attn_backend() is plugin.backend.SparseMLABackend
    ((indexer, operator),) = layer.taken
    assert indexer is layer.indexer
    assert operator.layer_name == layer.cache.prefix
    assert operator.topk_indices_buffer is layer.indexer.topk_indices_buffer


def test_the_operator_says_what_it_changes(plugin):
    (((library, function), named),) = plugin.registered
    assert isinstance(library, torch.library.Library)
    assert function is plugin.indexer.vllm_index
    assert named == {"mutates": "topk_indices"}


def test_the_operator_fills_the_buffer_it_returns(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    operator, seen = layer.taken[0][1], []
    library = SimpleNamespace(vllm_index=lambda *args: seen.append(args))
    monkeypatch.setattr(torch.ops, "sparse_mla", library, raising=False)
    assert operator(None, 1, 2, 3) is operator.topk_indices_buffer
    assert seen == [(1, 2, 3, operator.topk_indices_buffer, layer.cache.prefix)]


def test_the_index_buffer_is_read_anew_each_time(plugin, monkeypatch):
    """vLLM repoints it when a model shares it with a draft; layers without an indexer are given theirs."""
    layer = Layer(plugin, monkeypatch)
    other = torch.zeros(4, DIMS.index_topk, dtype=torch.int32)
    layer.indexer.topk_indices_buffer = other
    assert layer.impl.topk_indices_buffer is other
    given = torch.ones(4, DIMS.index_topk, dtype=torch.int32)
    layer.impl.topk_indices_buffer = given
    assert layer.impl.topk_indices_buffer is given
    sharing = plugin.impl.SparseMLAImpl(DIMS.num_heads, DIMS.head_dim, 1.0, 1, topk_indices_buffer=other)
    assert sharing.topk_indices_buffer is other
    assert sharing.scale == 1.0


def test_another_number_of_heads_is_refused(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    for heads, width in ((DIMS.num_heads + 1, DIMS.head_dim), (DIMS.num_heads, DIMS.head_dim - 1)):
        with pytest.raises(ConfigError, match="heads per rank"):
            plugin.impl.SparseMLAImpl(heads, width, 1.0, 1, topk_indices_buffer=layer.indexer.topk_indices_buffer)


def test_kernels_are_proved_and_the_schedule_checked_once_the_model_is_loaded(plugin, monkeypatch):
    layer = Layer(plugin, monkeypatch)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl._runtime._proved
    layer.impl._layer_names["model.layers.0.self_attn.attn"] = None
    with pytest.raises(ConfigError, match="layer 0 otherwise"):
        layer.impl.process_weights_after_loading(torch.bfloat16)
    layer.impl.record_logical_topk_ready()


def test_what_vllm_asks_of_an_impl(plugin):
    impl, backend = plugin.impl.SparseMLAImpl, plugin.backend.SparseMLABackend
    assert (impl.is_sparse, impl.supports_dense_mha_prefill, impl.supports_pcp) == (True, False, False)
    assert backend.get_impl_cls() is impl
    assert backend.is_mla()
    assert not backend.supports_kv_connector()


@pytest.fixture
def vllm(monkeypatch):
    """Empty modules in the place of those that the seams import from."""

    def put(name: str, **members) -> SimpleNamespace:
        parts = name.split(".")
        for stop in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:stop]), SimpleNamespace(__path__=[]))
        module = SimpleNamespace(**members)
        monkeypatch.setitem(sys.modules, name, module)
        parent = sys.modules[name.rpartition(".")[0]]
        setattr(parent, parts[-1], module)
        return module

    return put


def test_index_queries_pass_unchanged_on_a_cpu_and_go_to_vllm_elsewhere(vllm, monkeypatch):
    def native(x, group_size, *args, **kwargs):
        return "native", group_size, args, kwargs

    model = vllm("vllm.model_executor.models.deepseek_v2", per_token_group_quant_fp8=native)
    seen = []
    monkeypatch.setattr(layer_seams, "first_time", lambda name: seen.append(name) or len(seen) == 1)
    indexer = SimpleNamespace()
    layer_seams.take_indexer(indexer, "operator")
    patched = model.per_token_group_quant_fp8
    assert indexer.indexer_op == "operator"
    assert patched.__name__ == "native"
    x = torch.randn(3, 4, 128)
    same, scale = patched(x, 128, column_major_scales=False)
    assert same is x
    assert scale.shape == (3, 4, 1)
    assert (scale == 1).all()
    assert patched(x.to("meta"), 64, 1, b=2) == ("native", 64, (1,), {"b": 2})
    layer_seams.take_indexer(indexer, "another")
    assert indexer.indexer_op == "another"
    assert model.per_token_group_quant_fp8 is patched


def test_the_operator_is_registered_in_our_own_library(vllm):
    asked = []
    vllm("vllm.utils.torch_utils", direct_register_custom_op=lambda **named: asked.append(named))

    def function(a, b):
        raise AssertionError

    DEFINE("library", function, mutates="b")
    (registered,) = asked
    assert (registered["op_name"], registered["op_func"]) == ("function", function)
    assert (registered["mutates_args"], registered["target_lib"]) == (["b"], "library")
    assert registered["fake_impl"](1, 2) is None


def test_a_layer_is_found_by_its_name(vllm):
    vllm(
        "vllm.model_executor.layers.attention.attention",
        get_attention_context=lambda name: ("metadata", f"layer {name}", "cache", "slots"),
    )
    assert layer_seams.layer_context("a.b") == ("metadata", "layer a.b")


def test_a_seed_draws_nothing_while_its_prompt_is_read(vllm, monkeypatch):
    class Runner:
        def __init__(self):
            self.input_batch = SimpleNamespace(num_reqs=3, generators={0: "a", 1: "b", 2: "c"})
            self.discard_request_mask = SimpleNamespace(np=torch.tensor([True, False, True, True]).numpy())

        def sample_tokens(self, *args, **kwargs):
            self.seen = dict(self.input_batch.generators), args, kwargs
            if args == ("fail",):
                raise RuntimeError
            return "sampled"

    vllm("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner)
    calls = []
    monkeypatch.setattr(layer_seams, "first_time", lambda name: calls.append(name) or len(calls) == 1)
    native = Runner.sample_tokens
    DRAW()
    patched = Runner.sample_tokens
    assert patched is not native
    DRAW()
    assert Runner.sample_tokens is patched
    runner = Runner()
    assert runner.sample_tokens(7, some=8) == "sampled"
    assert runner.seen == ({1: "b"}, (7,), {"some": 8})
    assert runner.input_batch.generators == {0: "a", 1: "b", 2: "c"}
    with pytest.raises(RuntimeError):
        runner.sample_tokens("fail")
    assert len(runner.input_batch.generators) == 3
