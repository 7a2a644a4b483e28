"""The result for people, for programs and for a bug report."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...errors import UsageError
from ..report import write_whole
from .heatmap import LEGEND, rows, svg

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..report import Report
    from .target import Run


def write_files(done: Run, report: Report) -> None:
    """Whatever files were asked for; the saved run is whole already.

    Raises:
        UsageError: one cannot be written any more.
    """
    options, localiser = done.options, done.localiser
    if options.plot:
        edges = (localiser.edge, localiser.second_edge) if localiser else ()
        title = f"Facts recalled by length and depth. {verdict_line(done)[:1].upper()}{verdict_line(done)[1:]}"
        picture = svg(rows(done.book.outcomes), edges, options.chunk_tokens, title)
        _write("--plot", options.plot, picture.encode())
    if options.report:
        _write("--report", options.report, "\n".join(markdown(done, report)).encode())
    if options.junit:
        _write("--junit", options.junit, report.to_junit())


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        write_whole(path, content)
    except OSError as error:
        raise UsageError(option, needs="a file that can be written", got=f"{path}: {error.strerror}") from None


def show(done: Run, report: Report) -> None:
    """The result on stdout in the form that was asked for."""
    if done.options.format == "json":
        whole = report.to_json() | {"ok": done.exit_code == 0}
        json.dump(whole, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    elif done.options.format == "human":
        out = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        out.print(_table(done))
        out.print(LEGEND, markup=False, soft_wrap=True)
        for line in _lines(done, report):
            out.print(line, markup=False, soft_wrap=True)


def verdict_line(done: Run) -> str:
    """One line that says how the run ended."""
    if done.faulty:
        return "FAULT: facts are lost"
    if done.interrupted:
        return f"interrupted after {len(done.trials)} of {len(done.plan)} probes; no facts were lost in them"
    if done.stopped or done.unanswered:
        return (
            f"not checked to the end: {done.stopped or 'some probes had no answer'}; no facts were lost in the others"
        )
    return "verified: no facts were lost"


def _printable(text: str) -> str:
    """No control characters of a server on anybody's terminal."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _table(done: Run) -> Table:
    drawn = Table(
        title="facts recalled, by depth from first to last tenth", title_justify="left", box=None, pad_edge=False
    )
    for column, justify in (
        ("tokens", "right"),
        ("state", "left"),
        ("depth", "left"),
        ("facts", "right"),
        ("same answer", "left"),
    ):
        drawn.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows(done.book.outcomes):
        found, planted = (sum(bins) for bins in zip(*row.bins, strict=True))
        drawn.add_row(*map(Text, (f"{row.length:,}", row.name, row.marks(), f"{found}/{planted}", row.letter)))
    return drawn


def _lines(done: Run, report: Report) -> Iterator[str]:
    """Everything below the table."""
    localiser = done.localiser
    for verdict in localiser.verdicts if localiser else ():
        yield f"{verdict.id}: {verdict.statement}"
        yield from (f"  evidence: {text}" for text in verdict.evidence)
        yield from (f"  excludes: {text}" for text in verdict.excludes)
        yield from (f"  leaves open: {text}" for text in verdict.leaves_open)
    yield from (f"not reproducible (no fault by itself): {text}" for text in report.facts["not_reproducible"])
    yield from _comparison(done)
    yield from (f"proved: {text}" for text in report.proved)
    yield from (f"not proved: {text}" for text in report.not_proved)
    ledger = done.ledger
    cached = f" ({ledger.cached_tokens:,} of them cached)" if ledger.cached_tokens else ""
    yield (
        f"endpoint: {verdict_line(done)}; {ledger.prompt_tokens:,} prompt{cached} and {ledger.completion_tokens:,} answer tokens in "
        f"{ledger.requests} requests, {done.seconds:.0f} s"
    )
    if done.options.save and done.stopped:
        yield f"go on with: --save {done.options.save} --resume"


def _comparison(done: Run) -> Iterator[str]:
    if done.compared is None:
        return
    by_facts = {
        word: sum(one.facts == word for one in done.compared) for word in ("same", "lost", "gained", "both-lost")
    }
    counts = ", ".join(f"{count} {word}" for word, count in by_facts.items() if count) or "nothing in common"
    yield f"against {done.options.against}: facts: {counts}"
    for one in done.compared:
        where = f"tokens differ from {one.first_token} on" if one.first_token is not None else "same tokens"
        gap = f", log probabilities by up to {one.logprob_gap:.2g}" if one.logprob_gap else ""
        if one.facts != "same" or one.first_token is not None or one.logprob_gap:
            yield f"  {one.key}: facts {one.facts}; {where}{gap}"


def markdown(done: Run, report: Report) -> Iterator[str]:
    """Text for a bug report: no key, no URL, no prompt; answers only with ``--with-text``."""
    yield f"### sparse-mla verify --endpoint: {verdict_line(done)}"
    yield ""
    yield f"sparse-mla {__version__}; seed {report.facts['seed']}; index_topk {report.facts['index_topk']}"
    for number, server in enumerate(report.facts["servers"]):
        chunk = done.options.chunk_tokens[number]
        told = f", chunks of {chunk:,} tokens" if chunk else ""
        limit = f"{server['limit']:,}" if server["limit"] else "not told"
        yield (
            f"* server {number + 1}: `{str(server['model']).replace('`', '')}`, version {server['version'] or 'not told'}, context {limit}, "
            f"asked as {server['mode']}{told}"
        )
    yield from ("", "| tokens | state | depth, first to last tenth | facts | same answer |", "|--:|---|---|--:|---|")
    for row in rows(done.book.outcomes):
        found, planted = (sum(bins) for bins in zip(*row.bins, strict=True))
        yield f"| {row.length:,} | {row.name} | {row.marks()} | {found}/{planted} | {row.letter} |"
    yield from ("", LEGEND, "")
    yield from (f"    {line}" for line in _lines(done, report))
    if done.options.with_text:
        for key, outcome in done.book.outcomes.items():
            if outcome.answered:
                yield from ("", f"{key}:", "")
                yield from (f"    {_printable(line)}" for line in outcome.text.splitlines() or [""])
    yield ""
