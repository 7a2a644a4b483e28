"""Hypothesis strategies for scheduler scripts: small numbers shrink to short, plain traffic."""

from __future__ import annotations

from hypothesis import strategies as st

from ..schedule import LENGTHS, SLOTS, Action, Script, Step

_TAKES = st.one_of(st.integers(0, 16), st.sampled_from((1, 1, 1, 31, 64, 90)))
_ACTIONS = st.builds(
    Action,
    slot=st.integers(0, SLOTS - 1),
    take=_TAKES,
    drafts=st.one_of(st.just(0), st.integers(0, 5)),
    preempt=st.sampled_from((False, False, False, False, True)),
)
_STEPS = st.builds(
    Step,
    actions=st.lists(_ACTIONS, max_size=SLOTS, unique_by=lambda action: action.slot).map(tuple),
    padding=st.one_of(st.just(0), st.integers(0, 9)),
    poison=st.sampled_from((0xFF, 0x7F, 0x00, 0x3C)),
)


def scripts() -> st.SearchStrategy[Script]:
    """Up to a dozen steps of up to four requests on a pool that may be too small for them."""
    return st.builds(
        Script,
        block_size=st.sampled_from((16, 1, 3, 33, 64)),
        num_blocks=st.integers(1, 24),
        arrivals=st.lists(st.integers(0, 2 * len(LENGTHS) - 1), min_size=1, max_size=7).map(tuple),
        steps=st.lists(_STEPS, max_size=12).map(tuple),
    )
