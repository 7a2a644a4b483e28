from __future__ import annotations

import itertools

from sparse_mla.verify.endpoint import progress
from sparse_mla.verify.endpoint.outcome import Outcome, Probe


def test_time_left_follows_the_tokens_left(capfd, monkeypatch):
    clock = itertools.count(0, 10)  # every look at the clock is ten seconds later
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    short, long = Probe(state="cold", length=1000), Probe(state="cold", length=3000)
    known = Probe(state="repeat", length=90_000)
    with progress.Progress(quiet=False) as shown:
        for probe in (short, long, known):
            shown.expect(probe)
        shown.skip(known)
        with shown.step(short) as done:
            done(Outcome(facts=(("first", 0, True),)))
        with shown.step(long) as done:
            done(Outcome(failure="timeout", detail="no complete answer within 5 s"))
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("1,000 tokens cold: 1 of 1 facts")
    assert first.endswith("about 30 s left")
    assert second.startswith("3,000 tokens cold: no answer, timeout: no complete answer within 5 s")
    assert "left" not in second


def test_quiet_shows_nothing(capfd):
    with progress.Progress(quiet=True) as shown, shown.step(Probe(state="cold", length=10)) as done:
        done(Outcome())
    assert capfd.readouterr() == ("", "")
