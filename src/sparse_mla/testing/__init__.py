"""Shipped with the package: inputs, comparisons, cases and faults, used by verify, bench and the tests."""
