"""A suite that cannot fail proves nothing: every fault is caught by its clause, here and by a run from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from broken_kernels import BROKEN

from sparse_mla.testing.candidates import Candidate
from sparse_mla.testing.compare import ConformanceError
from sparse_mla.testing.conformance.parameters import CASES
from sparse_mla.testing.geometries import CI, PLAIN
from sparse_mla.testing.schedule import Action, Scheduler, Script, Step


def caught_by(candidate, clause):
    """The first case of the clause that fails, and its message. A crash counts."""
    for case in CASES:
        if case.clause == clause and case.tag == CI:
            try:
                case.run(candidate)
            except (ConformanceError, IndexError) as error:
                return f"{case}: {error}"
    return None


@pytest.mark.parametrize("name", BROKEN)
def test_its_clause_catches_the_fault(name):
    row, clause = BROKEN[name]
    found = caught_by(Candidate.of(name, [row]), clause)
    assert found is not None, f"{clause} passes with {name}"
    print(found[:200])


@pytest.mark.parametrize("name", ["TieOrderByCallSize", "OrderByCallSize", "GatherKeptForTheNextCall"])
def test_traffic_catches_what_depends_on_the_call(name):
    steps = tuple(Step((Action(0, 5), Action(1, 3, drafts=2)), padding=1) for _ in range(6))
    script = Script(block_size=3, num_blocks=60, arrivals=(5, 7, 3), steps=steps)
    candidate = Candidate.of(name, [BROKEN[name][0]])
    with pytest.raises(ConformanceError):
        Scheduler(candidate=candidate, geometry=PLAIN, script=script).play()


OUTSIDE = textwrap.dedent(
    """
    from dataclasses import replace
    from sparse_mla.backends.eager.select import Select
    from sparse_mla.backends.table import TABLE

    class Sound(Select):
        pass

    class SeesOneTooFew(Select):
        def __call__(self, index_q, index_weights, view, batch, *rest):
            seen = (batch.visible_lens - 1).clamp(min=0)
            super().__call__(index_q, index_weights, view, replace(batch, visible_lens=seen), *rest)

    base = next(row for row in TABLE if row.name == "eager" and str(row.stage) == "select")
    SOUND = replace(base, name="sound", path="outside:Sound")
    ROWS = (replace(base, name="broken", path="outside:SeesOneTooFew"),)
    NOWHERE = replace(base, name="nowhere", requires=replace(base.requires, archs=("no-such-device",)))
    """
)


def judge(folder, backend, *more):
    """`pytest --pyargs sparse_mla.testing --backend ...` as a user runs it, in a folder of their own."""
    (folder / "outside.py").write_text(OUTSIDE)
    command = [sys.executable, "-m", "pytest", "--pyargs", "sparse_mla.testing", "--backend", backend, "-qra", *more]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=300, check=False)


FEW = ("-k", "C2-exact-plain or C3-mixed-plain or judged")


def test_a_sound_kernel_from_outside_passes(tmp_path):
    ran = judge(tmp_path, "outside:SOUND", *FEW)
    assert ran.returncode == 0, ran.stdout
    assert "17 passed" in ran.stdout


def test_a_broken_kernel_from_outside_fails(tmp_path):
    ran = judge(tmp_path, "outside:ROWS", *FEW)
    assert ran.returncode == 1, ran.stdout
    assert "ConformanceError" in ran.stdout
    assert "selected indices differs" in ran.stdout


def test_a_kernel_that_declines_everything_fails(tmp_path):
    ran = judge(tmp_path, "outside:NOWHERE", *FEW)
    assert ran.returncode == 1, ran.stdout
    assert "declined all" in ran.stdout
    assert "needs no-such-device, got cpu" in ran.stdout


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("nobody", "backend: needs eager"),
        ("no.where:ROW", "needs an importable package:object"),
        ("outside:Sound", "needs a sparse_mla.backends.base.Row"),
    ],
)
def test_a_backend_that_leads_nowhere_is_one_line(tmp_path, backend, said):
    ran = judge(tmp_path, backend)
    assert ran.returncode == 4
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr + ran.stdout
