"""The entry point: light, harmless where it is not needed, and never silent where it is."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from sparse_mla.integrations.vllm import plugin, seams

HOOKS = ("hook_backend_choice", "hook_engine_config", "backend_name")


def test_the_entry_point_is_installed():
    (point,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="sparse_mla")
    assert point.load() is plugin.register


@pytest.mark.parametrize("setting", ["", "off", "always", "nonsense"])
def test_importing_the_plugin_loads_no_torch_no_triton_no_engine(setting):
    code = (
        "import sys, sparse_mla.integrations.vllm.plugin as plugin\n"
        "import sparse_mla.integrations.vllm.seams\n"
        "print([name for name in ('torch', 'triton', 'vllm', 'transformers') if name in sys.modules])"
    )
    env = {"PATH": "/usr/bin", "SPARSE_MLA_VLLM": setting}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_off_hooks_nothing(monkeypatch):
    called = []
    for hook in HOOKS:
        monkeypatch.setattr(seams, hook, lambda *_args, hook=hook: called.append(hook))
    monkeypatch.setenv("SPARSE_MLA_VLLM", "off")
    plugin.register()
    assert called == []
    monkeypatch.setenv("SPARSE_MLA_VLLM", "fallback")
    plugin.register()
    assert called == list(HOOKS)


@pytest.mark.parametrize("broken", HOOKS)
def test_a_broken_seam_warns_and_never_raises(broken, monkeypatch):
    said = []

    class Log:
        def warning(self, text, *values):
            said.append(text % values)

    def fail(*_args):
        raise ImportError("no module named vllm.moved")

    for hook in HOOKS:
        monkeypatch.setattr(seams, hook, fail if hook == broken else lambda *_args: None)
    monkeypatch.setattr(seams, "logger", Log)
    monkeypatch.delenv("SPARSE_MLA_VLLM", raising=False)
    plugin.register()
    (line,) = said
    assert "no module named vllm.moved" in line


@pytest.mark.parametrize("setting", ["fallback", "nonsense"])
def test_a_model_that_is_not_dsa_is_never_judged(setting, monkeypatch):
    """Not even a bad setting stops an engine that does not need us."""
    monkeypatch.setenv("SPARSE_MLA_VLLM", setting)
    monkeypatch.setattr(seams, "current_model_type", lambda: "llama")
    assert plugin.would_serve("llama", None) is False
    assert plugin.choose(lambda: "vllm.Own", None) == "vllm.Own"
