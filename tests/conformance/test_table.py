"""The shipped suite on every row of the table that can run here."""

from __future__ import annotations

from sparse_mla.testing.conformance.test_conformance import test_clause, test_scheduler, test_something_was_judged

__all__ = ["test_clause", "test_scheduler", "test_something_was_judged"]
