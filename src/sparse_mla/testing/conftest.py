"""Makes the suite's cases and candidates into pytest parameters."""

from __future__ import annotations

from .conformance.parameters import pytest_generate_tests, pytest_report_header

__all__ = ["pytest_generate_tests", "pytest_report_header"]
