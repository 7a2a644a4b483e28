"""Reads a server log of any size and encoding, once, in bounded memory: escape codes and line prefixes are stripped,
interleaved workers are told apart, wrapped lines are read as one.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO

from .signatures import MAX_SPAN, Match, Signature, squeeze

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_BLOCK_BYTES = 1 << 18
_LINE_CHARS = 1 << 14  # a longer line is read in pieces of this size, all with its number
_BUFFER_CHARS = 1 << 17  # text that one worker's stream holds before it is searched
_TAIL_LINES = 1 << 11
# A message inside another one that quotes it is not a fault: our plugin says why it serves.
_QUOTING = squeeze('vLLM has no backend of its own ("')
_SOURCE_LINES = ("raise ", "assert ")
_MAX_WORKERS = 128
_EXCERPT_CHARS = 300

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_ERROR = re.compile(
    r"\b[\w.]{0,80}(?:Error|Exception)\b|\bfatal error\b|\bcore dumped\b|\bMemory access fault\b"
    r"|\bWatchdog caught\b|\bSegmentation fault\b|\bBus error\b|\bKilled process\b|\bOOMKilled\b"
    r"|\bFloating point exception\b|\bHSA_STATUS_ERROR|\b(?:CUDA|HIP) error\b"
)
# What shows that a run failed without an error's name beside it: taken where nothing else is found.
_WEAK = re.compile(
    r"^Traceback \(most recent call last\)|\bhit an exception\b|\berror loading model\b|\b[Ff]ailed to (?:initialize|load|start)\b"
    r"|\b(?:missing tensor|tensor is missing|wrong number of tensors|terminate called)\b|^Missing \d{1,9} parameters\b"
    r"|Assertion [`'\"]|\bGGML_ASSERT\b|\[TRT-LLM\] (?:\[RANK \d{1,5}\] )?\[E\]|^E\d{4} \d\d:\d\d:|^(?:[\w.-]{1,40}: )?(?:fatal )?error: "
    r"|\b(?:[Oo]ut of memory|cudaMalloc failed|failed to allocate|ggml_abort|ggml_cuda_error|NVCC compilation failed|ptxas error)\b"
    r"|\b(?:nvml error|Received sigquit)\b|\bexited with (?:exit )?code -?[1-9]|^ERRO\[\d|^Killed$"
    r"|^\[(?:ERROR|FATAL|CRITICAL)\]\s|^\|? ?Value error, |\bmemory allocation failed with OOM\b|\| (?:ERROR|CRITICAL) \|"
)
_TRACEBACK = "Traceback (most recent call last)"
# At level INFO, but only of a worker that does not answer any more.
_HANGS = "No available shared memory broadcast block found"
_ENGINES = (
    *("vllm", "sglang", "sgl_kernel", "tensorrt_llm", "transformers", "ktransformers", "sparse_mla"),
    *("aiter", "flashinfer", "deep_gemm", "flash_mla", "lmcache", "mooncake"),
)
_LIBRARIES = ("site-packages", "dist-packages", "lib/python", "lib\\python", "<frozen ")
_QUIET_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING")
_MORE = tuple(
    f"validation error{plural} for {name}Config"
    for plural in ("", "s")
    for name in ("Vllm", "Model", "Cache", "Attention")
)
_ERROR_WORDS = (
    *("Error", "Exception", "fatal error", "core dumped", "Memory access fault"),
    *("Watchdog caught", "Segmentation fault", "Bus error", "Killed process", "OOMKilled"),
    *("Floating point exception", "HSA_STATUS_ERROR", "CUDA error", "HIP error"),
)
_LOUD_LEVELS = ("ERROR", "CRITICAL", "FATAL")
_BREAKS = re.compile(r"\r\n|\n|\r")
_PREFIX = re.compile(
    r"(?:"
    r"\((?P<worker>[A-Za-z]\w{0,63}\s{1,4}pid=\d{1,10})(?:,\s?ip=[\d.]{7,15})?\)\s{0,4}"
    r"|\[\d{4}-\d\d-\d\d[ T][\d:.,]{8,16}(?P<ranks>(?:\s[A-Z]{2}\d{1,5}){0,4})\]\s"
    r"|(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL):?\s\d\d-\d\d\s\d\d:\d\d:\d\d\s{1,4}(?:\[[^\]\n]{1,120}\]\s{0,4}|[\w./-]{1,80}\.py:\d{1,6}\]\s?)?"
    r"|\d{4}-\d\d-\d\d[T ][\d:.,+Z-]{5,32}\s{1,4}(?:std(?:out|err)\s[FP]\s)?"
    r"|[A-Z][a-z]{2}\s[ \d]\d\s\d\d:\d\d:\d\d\s[\w.-]{1,64}\s[\w./-]{1,64}\[\d{1,10}\]:\s"
    r"|[\w.-]{1,64}\s{0,16}\|\s"
    r"|\[rank\d{1,5}\]:\s?"
    r"){1,6}"
)


def printable(text: str, limit: int = _EXCERPT_CHARS) -> str:
    """``text`` without escape sequences or control characters, cut to ``limit``: safe to print on a terminal."""
    clean = _CONTROLS.sub("", _ESCAPES.sub("", text[: 4 * limit]).expandtabs(2).replace("\n", " "))
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def decoded(source: BinaryIO) -> Iterator[str]:
    """Blocks of text. UTF-8 unless a byte-order mark or a pattern of zero bytes says UTF-16 or UTF-32."""
    block = source.read(_BLOCK_BYTES)
    decoder = codecs.getincrementaldecoder(_encoding(block))(errors="replace")
    while block:
        yield decoder.decode(block)
        block = source.read(_BLOCK_BYTES)
    yield decoder.decode(b"", final=True)


def _encoding(head: bytes) -> str:
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF8, "utf-8-sig"),
    ):
        if head.startswith(mark):
            return name
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:4096]
    even, odd = sample[::2].count(0), sample[1::2].count(0)
    if max(even, odd) * 5 > len(sample) and min(even, odd) * 4 < max(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"
    return "utf-8"


def lines(blocks: Iterable[str]) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line; a line longer than 16,384 characters comes in pieces with one number."""
    number, pending, partial = 1, "", False
    for block in blocks:
        pieces = _BREAKS.split(pending + block)
        # A carriage return at the very end may be half of a CR LF: it stays with the rest.
        pending = pieces.pop()
        if block.endswith("\r") and pieces and not pending:
            pending = pieces.pop() + "\r"
        for piece in pieces:
            for start in range(0, len(piece) or 1, _LINE_CHARS):
                yield number, piece[start : start + _LINE_CHARS]
            number += 1
            partial = False
        while len(pending) > _LINE_CHARS + 1:
            yield number, pending[:_LINE_CHARS]
            pending, partial = pending[_LINE_CHARS:], True
    rest = pending.rstrip("\r")
    if rest or partial:
        yield number, rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A signature that occurs in the log: where first, how often, and what its holes held there."""

    key: str
    line: int
    worker: str
    count: int
    excerpt: str
    fields: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogReport:
    """What one pass over a log found. ``facts`` are settings that the engine printed; ``first_error`` is the first line
    that names one, else the first at level ERROR or above or that shows a failure otherwise ("" when there is none);
    ``foreign``: its tracebacks run through a program, and through no engine.
    """

    hits: tuple[Hit, ...]
    facts: Mapping[str, str]
    num_lines: int
    num_workers: int
    first_error: str
    foreign: bool = False


@dataclass(slots=True)
class _Stream:
    """Squeezed text of one worker, and which line stands at which offset of it."""

    worker: str
    parts: list[str] = field(default_factory=list)
    size: int = 0
    held: int = 0
    offsets: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    raws: list[str] = field(default_factory=list)

    def add(self, number: int, line: str) -> None:
        words = line.split()
        squeezed = "".join(words)
        self.offsets.append(self.size)
        self.numbers.append(number)
        self.raws.append(" ".join(words))
        self.parts.append(squeezed)
        self.size += len(squeezed)
        self.held += len(line) + 1

    def line_at(self, offset: int) -> int:
        return max(bisect.bisect_right(self.offsets, offset) - 1, 0)

    def excerpt(self, offset: int) -> str:
        """The line at ``offset`` as it stood, from the match on when the line is long."""
        index = self.line_at(offset)
        raw = self.raws[index]
        if len(raw) > _EXCERPT_CHARS:
            skip = offset - self.offsets[index]
            positions = (place for place, char in enumerate(raw) if not char.isspace())
            raw = raw[next(itertools.islice(positions, max(skip, 0), None), 0) :]
        return printable(raw)

    def keep_tail(self, text: str) -> None:
        """Forget all but what a match that begins here may still need."""
        start = max(len(text) - MAX_SPAN, 0)
        first = max(self.line_at(start), len(self.offsets) - _TAIL_LINES)
        self.offsets = [offset - start for offset in self.offsets[first:]]
        self.numbers = self.numbers[first:]
        self.raws = self.raws[first:]
        self.parts = [text[start:]]
        self.size = len(text) - start
        self.held = 0


@dataclass(slots=True)
class _Scan:
    """The state of one pass: streams by worker, first hit and count by key."""

    signatures: Mapping[str, tuple[Signature, ...]]
    facts: Mapping[str, tuple[Signature, ...]]
    streams: dict[str, _Stream] = field(default_factory=dict)
    hits: dict[str, Hit] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)

    def stream(self, worker: str) -> _Stream:
        if worker not in self.streams and len(self.streams) >= _MAX_WORKERS:
            worker = "(further workers)"
        return self.streams.setdefault(worker, _Stream(worker=worker))

    def search(self, stream: _Stream, *, final: bool) -> None:
        """Look at the stream's text. Matches that begin in the last ``MAX_SPAN`` characters wait for what follows."""
        text = "".join(stream.parts)
        limit = len(text) if final else max(len(text) - MAX_SPAN, 0)
        for key, signatures in self.signatures.items():
            for match in self._new(signatures, text, limit):
                self._record(key, match, stream)
        for name, signatures in self.facts.items():
            for match in self._new(signatures, text, limit):
                self._note(name, match)
        stream.keep_tail(text)

    @staticmethod
    def _new(signatures: tuple[Signature, ...], text: str, limit: int) -> Iterator[Match]:
        for signature in signatures:
            for match in signature.find_all(text):
                if match.start >= limit:
                    break
                if _QUOTING not in text[max(match.start - 2 * len(_QUOTING), 0) : match.start]:
                    yield match

    def _record(self, key: str, match: Match, stream: _Stream) -> None:
        number = stream.numbers[stream.line_at(match.start)]
        known = self.hits.get(key)
        count = known.count + 1 if known else 1
        if known is not None and known.line <= number:
            # Holes that the first occurrence lacks, because it was cut, are filled from later ones.
            self.hits[key] = replace(known, count=count, fields={**match.fields, **known.fields})
            return
        # Streams are searched one after another: a later one may hold the earlier line.
        older = known.fields if known else {}
        self.hits[key] = Hit(
            key=key,
            line=number,
            worker=stream.worker,
            count=count,
            excerpt=stream.excerpt(match.start),
            fields={**older, **match.fields},
        )

    def _note(self, name: str, match: Match) -> None:
        value = match.fields.get("value", "")
        known = self.found.get(name)
        if known is None or (name.startswith("max:") and float(value or 0) > float(known)):
            self.found[name] = value


def _error_in(line: str) -> str:
    """The part of a line that speaks of an error, from the error's name on where the line is long; "" when none does."""
    found = _ERROR.search(line) if any(word in line for word in _ERROR_WORDS) else None
    if found is None:
        return ""
    return line[found.start() if len(line) > _EXCERPT_CHARS // 2 else 0 :].strip()


def _level(prefix: re.Match[str] | None, levels: tuple[str, ...]) -> bool:
    return prefix is not None and any(level in prefix.group() for level in levels)


@dataclass(slots=True)
class _Trouble:
    """What shows that the run failed: the first line that names an error, else the first that shows it otherwise. And
    whose code the tracebacks run through.
    """

    error: str = ""
    otherwise: str = ""
    frames: set[str] = field(default_factory=set)

    def see(self, number: int, line: str, prefix: re.Match[str] | None) -> None:
        """Look at a line without its prefix."""
        if 'File "' in line and '", line ' in line:  # whole: a terminal may have cut the name of an engine
            self._frame(line)
        if self.error:
            if self.error.endswith(_MORE):
                self.error += f" {printable(line.strip())}"
        elif _HANGS in line or not _level(prefix, _QUIET_LEVELS):
            self._look(number, line, prefix)

    def _look(self, number: int, line: str, prefix: re.Match[str] | None) -> None:
        source = _is_source(line)
        if not source and (text := _error_in(line)):
            self.error = f"log line {number}: {printable(text)}"
        elif not self.otherwise and (source or _HANGS in line or _level(prefix, _LOUD_LEVELS) or _weak(line)):
            # A line of source may be all that is left of a traceback that was cut there.
            text = "a traceback, cut before its error" if _TRACEBACK in line else printable(line.strip())
            self.otherwise = f"log line {number}: {text}"

    def _frame(self, line: str) -> None:
        if any(engine in line for engine in _ENGINES):
            self.frames.add("engine")
        elif not any(library in line for library in _LIBRARIES):
            self.frames.add("program")


def _weak(line: str) -> bool:
    return _WEAK.search(line[:_EXCERPT_CHARS]) is not None


def _is_source(line: str) -> bool:
    """Whether a line of a traceback repeats a message before it is raised."""
    return line.lstrip().startswith(_SOURCE_LINES)


def scan(
    source: BinaryIO,
    signatures: Mapping[str, tuple[Signature, ...]],
    facts: Mapping[str, tuple[Signature, ...]] | None = None,
) -> LogReport:
    """Search a binary stream for ``signatures`` (by key) and settings (``facts``, hole named ``value``; the largest
    value where the name begins with ``max:``, else the first).
    """
    state, trouble = _Scan(signatures=signatures, facts=facts or {}), _Trouble()
    worker, number = "", 0
    for number, raw in lines(decoded(source)):
        if not raw:
            continue
        line = _ESCAPES.sub("", raw) if "\x1b" in raw else raw
        prefix = _PREFIX.match(line)
        if prefix is not None:
            # A line without any prefix continues the one above it: a terminal wrapped it, or a message has line breaks.
            worker = prefix["worker"] or (prefix["ranks"] or "").strip()
            line = line[prefix.end() :]
        trouble.see(number, line, prefix)
        if _is_source(line):
            continue
        stream = state.stream(worker)
        stream.add(number, line)
        if stream.held >= _BUFFER_CHARS:
            state.search(stream, final=False)
    for stream in state.streams.values():
        state.search(stream, final=True)
    return LogReport(
        hits=tuple(sorted(state.hits.values(), key=lambda hit: hit.line)),
        facts=state.found,
        num_lines=number,
        num_workers=len(state.streams),
        first_error=trouble.error or trouble.otherwise,
        foreign=trouble.frames == {"program"},
    )
