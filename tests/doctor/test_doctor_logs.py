from __future__ import annotations

import io
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_mla.doctor.logs import decoded, lines, printable, scan
from sparse_mla.doctor.signatures import Signature

KEYS = {"one": (Signature("the first message of {who} ends here"),), "two": (Signature("a second message"),)}
ONE = "the first message of somebody ends here"


def found(data, facts=None):
    report = scan(io.BytesIO(data if isinstance(data, bytes) else data.encode()), KEYS, facts)
    return {hit.key: hit for hit in report.hits}


class Repeated:
    """A binary stream of ``count`` bytes that is never held in memory."""

    def __init__(self, piece: bytes, count: int, tail: bytes = b"") -> None:
        self.piece, self.left, self.tail = piece, count, tail

    def read(self, size):
        if self.left <= 0:
            tail, self.tail = self.tail, b""
            return tail
        size = min(size, self.left)
        self.left -= size
        return (self.piece * (size // len(self.piece) + 1))[:size]


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"]
)
def test_encodings(encoding):
    hits = found(f"zw\xf6lf\n\xe9t\xe9\n{ONE}\n".encode(encoding))
    assert hits["one"].line == 3
    assert hits["one"].fields == {"who": "somebody"}


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_numbers(newline):
    assert found(newline.join(["a", "", "b", ONE, "c"]))["one"].line == 4


def test_line_break_over_a_block_boundary():
    blocks = ["a\r", "\nb\r", "c", "", "\r\n"]
    assert list(lines(blocks)) == [(1, "a"), (2, "b"), (3, "c")]


def test_escape_codes_and_prefixes():
    text = f"\x1b[1;31m(Worker_TP1 pid=77)\x1b[0m ERROR 05-12 10:11:12 [core.py:9] \x1b]0;title\x07{ONE}\x1b[0m"
    hit = found(text)["one"]
    assert hit.worker == "Worker_TP1 pid=77"
    assert hit.excerpt == ONE


@pytest.mark.parametrize(
    "prefix",
    [
        "2026-05-01T10:00:00.123456789Z stdout F ", "vllm-1  | ", "May  3 10:00:00 host vllm[12]: ", "(EngineCore_DP0 pid=4) ",
        "(RayWorkerWrapper pid=41, ip=10.0.0.7) ", "[rank3]: ", "INFO 05-12 10:11:12 [core.py:9] ",
        "vllm-1  | (EngineCore pid=4) ERROR 05-12 10:11:12 ",
    ],
)  # fmt: skip
def test_wrapped_lines_with_every_prefix(prefix):
    # The logger repeats its prefix on each line of a message; a wrapping terminal does not.
    text = f"{prefix}the first mess\n{prefix}age of some\nbody ends here\n"
    assert found(text)["one"].line == 1


def test_interleaved_workers():
    pieces = [ONE[start : start + 9] for start in range(0, len(ONE), 9)]
    workers = [f"(Worker_TP{rank} pid={100 + rank}) " for rank in range(4)]
    order = [(rank, place) for place in range(len(pieces)) for rank in range(4)]
    rng = random.Random(5)
    rng.shuffle(order)
    order.sort(key=lambda item: item[1])
    hits = found("\n".join(f"{workers[rank]}{pieces[place]}" for rank, place in order))
    assert hits["one"].count == 4


def test_earliest_line_counts_whatever_the_stream():
    text = f"(B pid=2) x\n(A pid=1) {ONE}\n(B pid=2) {ONE}\n(A pid=1) {ONE}\n"
    hit = found(text)["one"]
    assert (hit.line, hit.count, hit.worker) == (2, 3, "A pid=1")


def test_hole_of_a_cut_first_occurrence_is_filled_from_a_later_one():
    keys = {"k": (Signature("needs this much[[ : {much:num} MB]]"),)}
    report = scan(io.BytesIO(b"needs this much\n----\nneeds this much: 7 MB\n"), keys)
    assert report.hits[0].line == 1
    assert report.hits[0].fields == {"much": "7"}


def test_match_over_a_search_boundary():
    for gap in (131_000, 131_050, 131_072, 262_100):
        assert found("x" * gap + "\n" + ONE)["one"].line == 2
        assert found("x " * gap + ONE)["one"].line == 1


def test_long_line_shows_the_match():
    excerpt = found("y " * 60_000 + ONE + " z" * 60_000)["one"].excerpt
    assert excerpt.startswith("the first message")


@pytest.mark.parametrize(
    "piece", [b"x", b" ", b"\x1b", b"\x00", b"\xff", b"(", b"\n", b"x \n", b"the first message of ", b"\x1b[1m"]
)
def test_memory_is_bounded(piece):
    tracemalloc.start()
    try:
        report = scan(Repeated(piece, 2_500_000 // (1 + 9 * (b"\n" in piece)), tail=b"\n" + ONE.encode()), KEYS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert piece == b"\x00" or "one" in {hit.key for hit in report.hits}


def test_hundred_megabytes_on_one_line():
    report = scan(Repeated(b"0123456789abcdef", 100_000_000, tail=ONE.encode()), KEYS)
    assert (report.num_lines, report.hits[0].line) == (1, 1)


def test_many_workers_share_a_stream_in_the_end():
    text = "".join(f"(W{number} pid={number}) line\n" for number in range(2000)) + f"(W3 pid=3) {ONE}"
    report = scan(io.BytesIO(text.encode()), KEYS)
    assert report.num_workers <= 130
    assert report.hits


def test_facts_first_and_largest():
    facts = {
        "tp": (Signature("tensor_parallel_size={value:num}"),),
        "max:prompt": (Signature('"prompt_tokens": {value:num}'),),
    }
    report = scan(
        io.BytesIO(
            b'tensor_parallel_size=4\ntensor_parallel_size=8\n"prompt_tokens": 5\n"prompt_tokens": 50\n"prompt_tokens": 7'
        ),
        {},
        facts,
    )
    assert report.facts == {"tp": "4", "max:prompt": "50"}


def test_first_error_line():
    report = scan(io.BytesIO(b"fine\n(W pid=1) RuntimeError: boom\nValueError: later"), {})
    assert report.first_error == "log line 2: RuntimeError: boom"
    assert scan(io.BytesIO(b"no errors, 0 exceptions"), {}).first_error == ""
    assert (
        scan(io.BytesIO(b"(W pid=1) WARNING 11-30 04:09:06 [base.py:380] ValueError: only told"), {}).first_error == ""
    )
    two = b"pydantic.ValidationError: 1 validation error for ModelConfig\n  Value error, too long\n"
    assert scan(io.BytesIO(two), {}).first_error.endswith("for ModelConfig Value error, too long")


def test_printable_leaves_no_escape():
    assert (
        printable("\x1b[31mred\x1b[0m \x07bell \u202eflip \x9b31m \x1b]8;;http://x\x07link") == "red bell flip 31m link"
    )
    assert len(printable("a" * 5000)) == 300


@settings(max_examples=60)
@given(st.binary(max_size=3000))
def test_any_bytes(data):
    report = scan(io.BytesIO(data), KEYS, {"tp": (Signature("tensor_parallel_size={value:num}"),)})
    assert report.num_lines <= len(data) + 1


@settings(max_examples=60)
@given(
    st.lists(
        st.text(alphabet=st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), max_size=40),
        max_size=20,
    )
)
def test_lines_come_back(texts):
    joined = "\n".join(texts)
    assert [text for _, text in lines(decoded(io.BytesIO(joined.encode())))] == (
        joined.split("\n") if texts and texts[-1] else joined.split("\n")[:-1]
    )


def test_quoted_message_and_source_line_are_no_messages():
    quoted = f'INFO Using sparse-mla: chosen because vLLM has no backend of its own ("{ONE}"); off restores it'
    assert found(quoted) == {}
    assert found(f'    raise ValueError("{ONE}")\n') == {}
    assert found(f'{quoted}\n    raise ValueError("{ONE}")\nValueError: {ONE}')["one"].line == 3
