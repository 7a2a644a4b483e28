from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from sparse_mla.cli.main import main


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)

    @property
    def verdicts(self) -> list[str]:
        return [verdict["id"] for verdict in self.json["facts"]["verdicts"]]


@pytest.fixture
def verify(capfd, monkeypatch):
    """Run ``sparse-mla verify --endpoint`` in this process, short lengths by default, without any proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    def run(*arguments: str, lengths: str = "2000,4000", form: str = "json") -> Result:
        capfd.readouterr()
        given = [] if lengths is None or "--lengths" in arguments else ["--lengths", lengths]
        topk = [] if "--index-topk" in arguments else ["--index-topk", "512"]
        code = main(["verify", *arguments, *given, *topk, "--format", form])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return run
