"""The shipped suite's parameters, for the tests of this folder."""

from __future__ import annotations

from sparse_mla.testing.conformance.parameters import pytest_generate_tests, pytest_report_header

__all__ = ["pytest_generate_tests", "pytest_report_header"]
