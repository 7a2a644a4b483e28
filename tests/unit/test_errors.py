from __future__ import annotations

import pytest

from sparse_mla import errors
from sparse_mla.errors import BackendRejectedError, NotCheckableError, SparseMLAError, UsageError, WorkspaceError
from sparse_mla.requirements import Reason


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "thing"),
        ({"needs": 3}, "thing: needs 3"),
        ({"got": 4}, "thing: got 4"),
        ({"needs": 3, "got": 4}, "thing: needs 3, got 4"),
        ({"needs": 3, "got": 0}, "thing: needs 3, got 0"),
        ({"needs": "x", "got": "y", "hint": "Do z."}, "thing: needs x, got y. Do z."),
        ({"hint": "Do z."}, "thing. Do z."),
        ({"needs": False, "got": ""}, "thing: needs False, got "),
    ],
)
def test_one_sentence_says_what_needed_got_and_what_to_do(parts, said):
    error = SparseMLAError("thing", **parts)
    assert str(error) == said
    assert (error.what, error.needs, error.got) == ("thing", parts.get("needs"), parts.get("got"))


def test_a_rejection_lists_every_reason_on_its_own_line():
    reasons = [
        Reason(what="dtype", needs="bf16", got="f32"),
        Reason(what="device", needs="cuda", got="cpu", hint="Buy."),
    ]
    error = BackendRejectedError("headline", reasons, "Do this.")
    assert str(error).split("\n") == [
        "headline:",
        "  dtype  needs bf16, got f32",
        "  device  needs cuda, got cpu. Buy.",
        "  Do this.",
    ]
    assert error.reasons == tuple(reasons)


def test_a_rejection_without_reasons_is_one_line():
    assert str(BackendRejectedError("headline", [], "Do this.")) == "headline. Do this."


def test_exit_codes_and_ancestry():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind for kind in kinds if not issubclass(kind, SparseMLAError)} == set()
    assert {kind.__name__ for kind in kinds if kind.exit_code != 2} == {"NotCheckableError"}
    assert NotCheckableError.exit_code == 3
    assert issubclass(UsageError, ValueError)  # engines that catch ValueError still do
    assert not issubclass(WorkspaceError, ValueError)
