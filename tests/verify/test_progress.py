"""Progress goes to stderr, one line per step when that is no terminal, and to nowhere when asked."""

from __future__ import annotations

from sparse_mla.verify.progress import Steps


def test_one_line_a_step(capsys):
    with Steps() as steps:
        steps.expect(2)
        for name in ("first [step]", "second"):
            with steps.step(name):
                pass
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rsplit(":", 1)[0] for line in err.splitlines()] == ["[1/2] first [step]", "[2/2] second"]


def test_quiet(capsys):
    with Steps(quiet=True) as steps, steps.step("only"):
        pass
    assert capsys.readouterr() == ("", "")
