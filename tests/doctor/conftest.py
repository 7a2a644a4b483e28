from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
