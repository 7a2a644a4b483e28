"""``sparse-mla bench``: each stage judged, then timed beside torch and the device's ceilings."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .needs import require_device, require_torch
from .render import console, emit_json, human_bytes, table

if TYPE_CHECKING:
    import argparse

SUMMARY = "time each stage, after judging it, beside torch and the device's own ceilings"


def configure(parser: argparse.ArgumentParser) -> None:
    """Device, backend, mode, and which shapes."""
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--backend", default="auto", help="a backend of the table, or auto")
    parser.add_argument("--strict", action="store_true", help="prefill and decode equal in bits")
    parser.add_argument("--only", default="", metavar="TEXT", help="only shapes whose name contains it")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 when a case is not right: it is named and gets no figure."""
    result = report(args)
    if args.format == "json":
        emit_json(result)
    elif args.format == "human":
        _show(result)
    return 0 if result["ok"] else 1


def report(args: argparse.Namespace) -> dict[str, Any]:
    """The whole answer as plain data; times in µs.

    Raises:
        NotCheckableError: torch is not installed.
        UsageError: a device that is none, or no shape that ``--only`` names.
    """
    require_device(args.device)
    require_torch()
    import torch

    from ..bench.cases import Prepared, shapes
    from ..bench.peers import importable, torch_call
    from ..bench.timing import ceilings, median_us
    from ..device import probe
    from ..testing.meter import peak_bytes

    where, facts = torch.device(args.device), probe(args.device)
    every = shapes(small=where.type == "cpu")
    wanted = [shape for shape in every if args.only in str(shape)]
    if not wanted:
        raise UsageError("--only", needs="part of: " + " | ".join(map(str, every)), got=repr(args.only))
    best = ceilings(where)
    cases = []
    for shape in wanted:
        print(f"bench: {shape}", file=sys.stderr)
        case = Prepared(shape, facts, where, backend=args.backend, strict=args.strict)
        stage = case.plan.describe()["stages"][shape.stage]  # type: ignore[index]
        entry: dict[str, Any] = {"id": str(shape), **stage}
        wrong = case.judge()
        if wrong is not None:
            cases.append(entry | {"ok": False, "evidence": str(wrong)})
            continue
        floor = case.floor_us(best)
        took = median_us(case.call, where, graph=where.type == "cuda" and shape.rows * shape.requests <= 256)
        entry |= {"ok": True, "us": took, "floor_us": floor, "torch_us": None, "torch_bytes": None}
        if shape.requests == 1:
            peer = partial(torch_call, case)
            entry |= {"torch_us": median_us(peer, where), "torch_bytes": peak_bytes(peer, args.device)}
            entry["peers"] = {name: _peer(case, make, where) for name, make in importable(shape.stage)}
        cases.append(entry)
        del case
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "schema": "sparse-mla/bench/1",
        "ok": all(case["ok"] for case in cases),
        "device": {"arch": facts.arch, "name": facts.name, "torch": torch.__version__},
        "ceilings": best,
        "cases": cases,
    }


def _peer(case: Any, make: Any, where: Any) -> dict[str, Any]:
    """``us`` of a vendor's kernel, or ``failed``: what it raised, or where its answer is wrong."""
    from ..bench.timing import median_us

    try:
        call = make(case)
        wrong = case.judge(call())
        return {"us": median_us(call, where)} if wrong is None else {"failed": str(wrong)}
    except Exception as error:  # noqa: BLE001 (whatever it is, it is that kernel's result)
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def _show(result: dict[str, Any]) -> None:
    out = console()
    best = ", ".join(f"{name} {value:.0f}" for name, value in result["ceilings"].items())
    out.print(f"{result['device']['arch']} {result['device']['name']}: {best}", markup=False)
    rows = []
    for case in result["cases"]:
        if not case["ok"]:
            rows.append((case["id"], case["backend"], case["mode"], "WRONG", "", "", case["evidence"], ""))
            continue
        peer = case["torch_us"]
        against = "" if peer is None else f"{peer / case['us']:.1f} x"
        took, floor = f"{case['us']:.0f}", f"{case['us'] / case['floor_us']:.2f} x"
        beside = "" if peer is None else human_bytes(case["torch_bytes"])
        scratch = human_bytes(case["scratch_bytes"])
        rows.append((case["id"], case["backend"], case["mode"], took, floor, against, scratch, beside))
    columns = ("case", "backend", "mode", "µs", "floor", "faster than torch", "scratch", "torch's")
    out.print(table("Medians, caches cold", columns, rows))
    for case in result["cases"]:
        for name, found in case.get("peers", {}).items():
            said = f"{found['us']:.0f} µs, ours {case['us']:.0f}" if "us" in found else f"no figure: {found['failed']}"
            out.print(f"{name}, {case['id']}: {said}", markup=False)
