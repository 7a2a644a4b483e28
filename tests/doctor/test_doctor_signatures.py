from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla.doctor.knowledge import load
from sparse_mla.doctor.signatures import MAX_HOLE, Signature, SignatureError, squeeze

LOCKED = Signature(
    "Workspace is locked but allocation from '{site}[[' requires {needed:num} MB, current size is {current:num} MB]]"
)
LINE = (
    "Workspace is locked but allocation from 'a.py:3:f' requires 12.50 MB, current size is 4 MB. Growth is not allowed"
)


def first(signature, text):
    return next(signature.find_all(squeeze(text)), None)


def test_fields():
    assert first(LOCKED, LINE).fields == {"site": "a.py:3:f", "needed": "12.50", "current": "4"}


@pytest.mark.parametrize("width", [7, 23, 80])
def test_wrapped_anywhere(width):
    wrapped = "\n".join(LINE[start : start + width] for start in range(0, len(LINE), width))
    assert first(LOCKED, wrapped).fields == first(LOCKED, LINE).fields


def test_cut_line_keeps_what_was_there():
    assert first(LOCKED, LINE[:75]).fields == {"site": "a.py:3:f", "needed": "12.50"}
    assert first(LOCKED, LINE[:45]).fields == {"site": "a.py"}
    assert first(LOCKED, LINE[:30]) is None


def test_hole_is_bounded():
    signature = Signature("a beginning here {x} and an end")
    assert first(signature, "a beginning here " + "x" * MAX_HOLE + " and an end") is not None
    assert first(signature, "a beginning here " + "x" * (MAX_HOLE + 1) + " and an end") is None


def test_several_matches_do_not_overlap():
    assert len(list(LOCKED.find_all(squeeze(LINE * 3)))) == 3


@pytest.mark.parametrize(
    "text", ["{x}{y} two holes side by side", "abc{x}{y}", "{x} no beginning", "ab{x}", "beginning [[ unclosed", ""]
)
def test_not_well_formed(text):
    with pytest.raises(SignatureError):
        Signature(text)


@pytest.mark.parametrize(
    "piece", ["Workspace is locked but allocation from '", "a", "No valid attention backend found for ", "[", "'"]
)
def test_hostile_text_takes_linear_time(piece):
    """Ten times the text may take about ten times as long, for every signature of the knowledge base."""
    signatures = [signature for defect in load() for signature in defect.signatures]

    def seconds(size):
        text = squeeze(piece * (size // len(piece)))
        started = time.process_time()
        for signature in signatures:
            for _ in signature.find_all(text):
                pass
        return time.process_time() - started

    seconds(10_000)
    small, large = min(seconds(30_000) for _ in range(3)), min(seconds(300_000) for _ in range(2))
    assert large < 40 * small + 0.05


@given(st.text(max_size=300))
def test_any_text(text):
    for _ in LOCKED.find_all(squeeze(text)):
        pass
