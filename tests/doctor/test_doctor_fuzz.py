"""A short run of the fuzzer (fuzz.py) in the gate; docs/doctor.md has the figures of a long one."""

from __future__ import annotations

from fuzz import run

MIB = 1 << 20


def test_hostile_logs_and_configs(record_property):
    outcome = run(40, seed=20)
    print(f"\n{outcome}")
    record_property("outcome", str(outcome))
    assert (outcome.logs, outcome.configs) == (40, 40)
    assert outcome.found > 40
    assert 0 < outcome.refused < 40
    assert outcome.peak_bytes < 64 * MIB
    assert outcome.slowest_s < 10
