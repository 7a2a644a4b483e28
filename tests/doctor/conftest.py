from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from sparse_mla.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tree(tmp_path):
    """A function that writes files below a small vLLM package and returns the package folder."""

    def write(files: dict[str, str], version: str = "9.9.9") -> Path:
        root = tmp_path / "vllm"
        base = {
            "platforms/__init__.py": "",
            "v1/attention/__init__.py": "",
            "_version.py": f"__version__ = version = {version!r}\n",
        }
        for path, text in {**base, **files}.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return root

    return write


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs the command in this process: (exit code, stdout, stderr). No traceback may ever appear."""

    def call(*arguments, stdin=None):
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", stdin)
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def asks(run):
    def call(*arguments):
        code, out, _ = run("doctor", "--json", *arguments)
        return code, json.loads(out)

    return call
