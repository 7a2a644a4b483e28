"""``sparse-mla verify``: proof by hash and reference, on the operators or inside an engine; by recall on any endpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import NotCheckableError, UsageError
from ..verify import endpoint
from .needs import require_device, require_torch
from .render import console, emit_json, human_bytes, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from rich.console import Console

    from ..verify.report import Report

SUMMARY = "prove that long prefill is right, by hash over chunk plans and by an independent reference"
_GPU_COMPLETE = 131_072
"""Tokens of a prompt up to which every query row is looked at on a GPU."""
_OPERATORS_ALONE = ("all_rows", "device", "tp")
_MOST = 2**31 - 4096  # positions are 32-bit, and decoded tokens and another request come on top


def configure(parser: argparse.ArgumentParser) -> None:
    """Without --engine, the operators of this machine; with it, a real engine in a child process; --endpoint: a server."""
    parser.add_argument("--engine", choices=("vllm",), help="serve a model in a real engine and compare")
    parser.add_argument(
        "--model", metavar="DIR|tiny|retrieval",
        help="engine: the checkpoint, or one made here; operators: the model whose geometry is taken; endpoint: a name",
    )  # fmt: skip
    parser.add_argument("--tp", type=int, help="operators with --model: tensor parallel size of one rank")
    parser.add_argument("--lengths", metavar="N,N,...", help="prompt lengths in tokens")
    parser.add_argument("--chunk-tokens", metavar="N,N,...", help="sizes of the uniform chunk plans")
    parser.add_argument("--quick", action="store_true", help="the same checks on less: under a minute")
    parser.add_argument(
        "--all-rows", action="store_true", help="look at every query row (the default on a GPU up to 131,072 tokens)"
    )
    parser.add_argument("--device", help="operators: cpu (the default), cuda or cuda:N")
    parser.add_argument("--backend", help="backend of every stage, by name; never falls back")
    parser.add_argument("--seed", type=int, help="of inputs, placements and drawn rows (0); of prompts (always new)")
    parser.add_argument(
        "--self-test", action="store_true", help="put known faults into operators and engine: is each one caught?"
    )
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write the checks as JUnit XML")
    endpoint.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 verified, 1 a fault found, 2 wrong usage, 3 could not be checked."""
    from ..verify.report import writable, write_whole

    if args.endpoint:
        _refuse(args, "no --endpoint beside it", "one", "engine", "self_test", "quick", "backend", *_OPERATORS_ALONE)
        return endpoint.run(args)
    endpoint.refuse_alone(args)
    if args.self_test:
        needs = "no --self-test beside it"
        _refuse(args, needs, "one", "engine", "model", "lengths", "chunk_tokens", "backend", *_OPERATORS_ALONE)
    if args.engine:
        _refuse(args, "the operator target", f"--engine {args.engine}", *_OPERATORS_ALONE)
    args.device = "cpu" if args.device is None else args.device
    require_device(args.device)
    args.seed = args.seed or 0
    if args.seed < 0:
        raise UsageError("--seed", needs="a whole number >= 0", got=args.seed)
    if args.junit is not None:
        writable(args.junit)
    report = _self_test(args) if args.self_test else _operators(args) if args.engine is None else _engine(args)
    if args.junit is not None:
        write_whole(args.junit, report.to_junit())
    if args.format == "json":
        emit_json(report.to_json())
    elif args.format == "human":
        _show_self_test(report) if args.self_test else _show(report)
    return 3 if args.self_test and report.ok and report.not_checked else report.exit_code


def _refuse(args: argparse.Namespace, needs: str, got: str, *names: str) -> None:
    """What another target understands is refused, never ignored."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value is not False:
            raise UsageError(f"--{name.replace('_', '-')}", needs=needs, got=got)


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """``"20000,40000"`` -> (20000, 40000), each once, ascending.

    Raises:
        UsageError: not numbers, or outside what 32-bit positions allow.
    """
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    bad = [part for part in parts if not part.isascii() or not part.isdecimal() or not 1 <= int(part[:12]) <= _MOST]
    if bad:
        raise UsageError(option, needs=f"whole numbers from 1 to {_MOST}, with commas between them", got=repr(bad[0]))
    return tuple(sorted({int(part) for part in parts}))


def _operators(args: argparse.Namespace) -> Report:
    require_torch()
    from ..testing.geometries import GLM_TP4
    from ..verify.operators import CHUNK_TOKENS, LENGTHS, OperatorOptions, quick, verify_operators
    from ..verify.progress import Steps

    dims = GLM_TP4.dims
    if args.model is not None:
        from ..dims import MLADims
        from ..verify.checkpoint import MADE

        if args.model in MADE:
            raise UsageError(f"--model {args.model}", needs="--engine vllm beside it", got="none")
        dims = MLADims.from_config(args.model, tensor_parallel=1 if args.tp is None else args.tp)
    elif args.tp is not None:
        raise UsageError("--tp", needs="--model", got="none", hint="Without it the geometry is GLM-5.1's at TP=4.")
    by_device = 0 if args.device == "cpu" else _GPU_COMPLETE
    options = OperatorOptions(
        lengths=LENGTHS if args.lengths is None else whole_numbers("--lengths", args.lengths),
        chunk_tokens=CHUNK_TOKENS if args.chunk_tokens is None else whole_numbers("--chunk-tokens", args.chunk_tokens),
        dims=dims,
        backend=args.backend,
        device=args.device,
        seed=args.seed,
        complete_up_to=sys.maxsize if args.all_rows else by_device,
    )
    with Steps(quiet=args.format == "quiet") as steps:
        report = verify_operators(quick(options) if args.quick else options, steps)
    return replace(report, not_checked=(f"engine ({_why_no_engine()})",))


def _self_test(args: argparse.Namespace) -> Report:
    require_torch()
    from ..integrations.vllm.seams import SUPPORTED
    from ..verify.engine import installed_engine
    from ..verify.progress import Steps
    from ..verify.self_test import CLEAN_RUNS, self_test
    from ..verify.self_test_engine import engine_faults

    missing = []
    try:
        installed_engine(SUPPORTED)
    except NotCheckableError as error:
        missing.append(f"faults of the engine ({error})")
    runs = CLEAN_RUNS // 10 if args.quick else CLEAN_RUNS
    engine = None if missing else engine_faults
    with Steps(quiet=args.format == "quiet") as steps:
        return self_test(steps, clean_runs=runs, seed=args.seed, engine=engine, not_checked=missing)


def _why_no_engine() -> str:
    from ..integrations.vllm.seams import SUPPORTED
    from ..verify.engine import installed_engine

    try:
        installed_engine(SUPPORTED)
    except NotCheckableError as missing:
        return str(missing)
    return "not asked for: sparse-mla verify --engine vllm --model tiny"


def _engine(args: argparse.Namespace) -> Report:
    from ..integrations.vllm.seams import SUPPORTED
    from ..verify.engine import CHUNK_TOKENS, LENGTHS, EngineOptions, quick, verify_engine
    from ..verify.progress import Steps

    if args.model is None:
        raise UsageError("--engine", needs="--model DIR, or --model tiny or retrieval for one made here", got="none")
    options = EngineOptions(
        model=args.model,
        supported=SUPPORTED,
        lengths=LENGTHS if args.lengths is None else whole_numbers("--lengths", args.lengths),
        chunk_tokens=CHUNK_TOKENS if args.chunk_tokens is None else whole_numbers("--chunk-tokens", args.chunk_tokens),
        backend=args.backend,
        seed=args.seed,
    )
    with Steps(quiet=args.format == "quiet") as steps:
        return verify_engine(quick(options) if args.quick else options, steps)


def _show_self_test(report: Report) -> None:
    """A row for each kind of fault."""
    out = console()
    rows = [
        [case["kind"], case["level"], case["short"], case["caught_by"] or "ESCAPED", case["first_stage"] or ""]
        for case in report.cases
    ]
    title = f"Known faults: a prompt of {report.facts['short_tokens']} tokens, and a long one"
    out.print(table(title, ["kind", "level", "short", "long: caught by", "first stage"], rows))
    out.print(f"clean runs: {report.facts['clean_runs']}, alarms: {report.facts['alarms']}", markup=False)
    _show_verdict(out, report)


def _show(report: Report) -> None:
    """Tables for people."""
    out = console()
    for case in report.cases:
        _show_case(out, case)
    _show_facts(out, report.facts)
    _show_verdict(out, report)


def _show_verdict(out: Console, report: Report) -> None:
    failed = [check for check in report.checks if not check.ok]
    for check in failed:
        out.print(f"FAULT {check.id}: {check.case}: {check.what}: {check.detail}", markup=False)
    for word, lines in (
        ("proved", report.proved),
        ("not proved", report.not_proved),
        ("not checked", report.not_checked),
    ):
        for line in lines:
            out.print(f"{word}: {line}", markup=False)
    verdict = (
        f"{len(failed)} of {len(report.checks)} checks failed" if failed else f"verified, {len(report.checks)} checks"
    )
    out.print(f"{report.target}: {verdict}, in {report.seconds:.0f} s", markup=False)


def _show_case(out: Console, case: Mapping[str, Any]) -> None:
    """A row for each plan, a column for each stage: the first digits of its hash."""
    stages, first = list(case["stages"]), case["plans"][0]["sha256"]
    title, looked = case["case"], case.get("rows")
    if looked:
        title += f": {looked['query']:,} query rows, {looked['reference']} of them against the reference"
    rows = [
        [plan["name"], plan["calls"], *(_cell(plan["sha256"][stage], first[stage]) for stage in stages)]
        for plan in case["plans"]
    ]
    columns = [stage.replace("cache", "").strip(" _") for stage in stages]
    out.print(table(title, ["chunk plan", "calls", *columns], rows))


def _cell(value: str, first: str) -> str:
    return value[:8] if value == first else f"{value[:8]} DIFFERS"


def _show_facts(out: Console, facts: Mapping[str, Any]) -> None:
    stages = ", ".join(f"{stage} {item['backend']} ({item['mode']})" for stage, item in facts["stages"].items())
    scratch = facts["scratch"]
    used = f"{human_bytes(scratch['planned_bytes'])} planned"
    if "touched_bytes" in scratch:
        used = f"{human_bytes(scratch['touched_bytes'])} of {used}"
    out.print(f"{facts['device']['arch']}: {stages}; index_topk {facts['index_topk']}; scratch {used}", markup=False)
