"""One thread for torch and no spinning: the gate shares two cores, and bits must not hang on their number."""

from __future__ import annotations

import os
import signal
from unittest import mock

from hypothesis import HealthCheck, settings

from sparse_mla.testing.plugin import add_options

with mock.patch.dict(os.environ, {"OMP_WAIT_POLICY": "passive"}):  # read once, when torch loads its thread pool
    import torch

torch.set_num_threads(1)

# No property of this project is how fast an example is drawn or run, which on a shared machine says nothing.
settings.register_profile("gate", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gate")


def pytest_addoption(parser):
    add_options(parser)


def pytest_configure() -> None:
    """A shell that starts the gate in the background ignores Ctrl-C for all below it; tests send Ctrl-C to children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
