from __future__ import annotations

import pytest
from doctor_evidence import leads_to

from sparse_mla.doctor import flags
from sparse_mla.doctor.knowledge import GROUPS, SEVERITIES, KnowledgeError, find, load, parse
from sparse_mla.engine_source import tree as source
from sparse_mla.engine_source.audit import PROBES
from sparse_mla.errors import UsageError

DEFECTS = load()
FACTS = {
    "arch", "batch_invariant", "block_size", "calculate_kv_scales", "dcp", "dsa", "engine", "engine_versions", "heads_per_rank", "hisparse",
    "index_head_dim",
    "index_share", "index_topk", "kv_cache_dtype", "logits_mb", "max_model_len", "max_num_batched_tokens", "model_type",
    "plugin_excluded", "pp",
    "quant_method", "sm", "speculative_tokens", "stage_starts_shared", "tp", "vendor",
}  # fmt: skip

ENTRY = """
[[defect]]
id = "a-defect"
title = "A title"
severity = "crash"
engine = "vllm"
signatures = ["a message that nobody else prints"]
cause = "why"
proof = "how to see it"
remedies = [{ do = "this", command = "that" }]
references = ["owner/name#1"]
positive = { log = "a message that nobody else prints" }
negative = { log = "another" }
"""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.id)
def test_positive_example_leads_to_the_entry_and_negative_does_not(defect):
    positive, negative = defect.positive, defect.negative
    assert defect.id in leads_to(positive.log, positive.facts, positive.probes)
    assert defect.id not in leads_to(negative.log, negative.facts, negative.probes)


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.signatures and not d.symptom], ids=lambda defect: defect.id)
def test_message_of_a_cause_is_read_first(defect):
    # Two entries may share a file name in a traceback; the more telling one must not be hidden by another.
    assert leads_to(defect.positive.log, defect.positive.facts)[0] == defect.id


def test_size_and_coverage():
    assert len(DEFECTS) >= 60
    assert {defect.group for defect in DEFECTS} == set(GROUPS)
    assert {defect.severity for defect in DEFECTS} == set(SEVERITIES)
    assert all(sum(defect.group == group for defect in DEFECTS) >= 5 for group in GROUPS)


def test_probes_and_entries_name_each_other():
    assert {defect.probe for defect in DEFECTS if defect.probe} == set(PROBES)


def test_rules_read_only_facts_that_something_provides():
    rules = [rule for defect in DEFECTS for rule in (defect.device, defect.config, defect.threshold) if rule]
    rules += [remedy.when for defect in DEFECTS for remedy in defect.remedies if remedy.when]
    assert {name for rule in rules for name in rule.names} <= FACTS


def test_options_in_commands_are_declared():
    """An option that a command uses but does not declare could be offered to a version that lacks it."""
    ours = {"--endpoint", "--log", "--model", "--pp", "--force-reinstall", "--no-deps"}
    for defect in DEFECTS:
        for remedy in defect.remedies:
            used = {word for word in remedy.command.split() if word.startswith("--")} - ours
            declared = {flag if flag.startswith("--") else "--attention-config" for flag in remedy.flags}
            assert used <= declared, (defect.id, used - declared)


def test_every_declared_option_exists_in_the_installed_engine():
    known = flags.Options(source.installed()).names
    assert "--attention-config" in known  # how a field of it is set
    missing = {flag for defect in DEFECTS for remedy in defect.remedies for flag in remedy.flags} - known
    assert missing == set()
    assert "--no-such-option" not in known


def test_texts_are_one_line_and_say_something():
    for defect in DEFECTS:
        for text in (defect.title, defect.cause, defect.proof, *(remedy.do for remedy in defect.remedies)):
            assert "\n" not in text
            assert len(text) > 5
        assert len(set(defect.references)) == len(defect.references)


@pytest.mark.parametrize(
    "change",
    [
        ('severity = "crash"', 'severity = "bad"'),
        ('engine = "vllm"', 'engine = "other"'),
        ('id = "a-defect"', 'id = "A defect"'),
        ('references = ["owner/name#1"]', 'references = ["somewhere"]'),
        ('remedies = [{ do = "this", command = "that" }]', "remedies = []"),
        ('remedies = [{ do = "this", command = "that" }]', 'remedies = [{ do = "this", run = "that" }]'),
        ('signatures = ["a message that nobody else prints"]', 'signatures = ["{x} too open"]'),
        ('signatures = ["a message that nobody else prints"]', 'signatures = ["short"]'),
        ('signatures = ["a message that nobody else prints"]', ""),
        ('cause = "why"', 'cause = ""'),
        ('cause = "why"', 'cause = "why"\nversions = "about 3"'),
        ('cause = "why"', "cause = \"why\"\ndevice = \"__import__('os').system('x')\""),
        ('cause = "why"', 'cause = "why"\nsurprise = 1'),
        ('cause = "why"', 'cause = "why"\nbasis = "guess"'),
        ('positive = { log = "a message that nobody else prints" }', "positive = {}"),
        ("[[defect]]", "[[defect"),
        ("[[defect]]", "extra = 1\n[[defect]]"),
    ],
)
def test_schema_refuses(change):
    assert parse(ENTRY, group="gate")[0].id == "a-defect"
    with pytest.raises(KnowledgeError):
        parse(ENTRY.replace(*change), group="gate")


def test_schema_refuses_unknown_group():
    with pytest.raises(KnowledgeError):
        parse(ENTRY, group="other")


def test_versions_and_packages_narrow():
    defect = find("plan-cached-under-small-key")
    facts = {"engine": "vllm", "vendor": "amd", "dsa": True}
    assert [defect.applies({**facts, "version:vllm": v}) for v in ("0.22.1", "0.23.0", "0.25.1", "0.26.0", "0.24.0rc1")] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert defect.applies(facts) is None
    assert defect.applies({**facts, "version:vllm": "not a version"}) is None
    assert defect.applies({**facts, "version:vllm": "0.28.0"}, versions=False) is True


def test_find_names_the_nearest():
    with pytest.raises(UsageError, match="no-sparse-backend"):
        find("no-backend-here")
