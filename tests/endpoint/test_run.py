from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET

import pytest
from scripted_server import Script, serve

KEY = "sk-very-secret-0123"


def test_a_healthy_server_is_verified(verify):
    script = Script()
    with serve(script) as url:
        result = verify("--endpoint", f"{url}/base/v1")
    assert result.code == 0
    report = result.json
    assert report["ok"]
    assert report["findings"] == []
    assert report["facts"]["verdicts"] == []
    assert report["facts"]["servers"][0]["version"] == "1.2.3"
    assert report["facts"]["servers"][0]["mode"] == "completions, token ids"
    states = {case["probe"].split(":")[1].split("/")[0] for case in report["cases"]}
    assert states == {"baseline", "cold", "repeat", "prefix", "concurrent", "beside"}
    by_probe = {case["probe"]: case for case in report["cases"]}
    assert by_probe["0:cold/4000/0"]["prompt_tokens"] == 4000
    assert by_probe["0:cold/4000/0"]["cached_tokens"] == 0
    assert by_probe["0:repeat/4000/0"]["cached_tokens"] > 3900
    assert by_probe["0:prefix/3998/of-4000/0"]["cached_tokens"] > 1000
    asked = [body for path, body, _ in script.requests if path.endswith("/completions")]
    assert sorted({len(body["prompt"]) for body in asked} & {2000, 1999, 4000, 3998}) == [1999, 2000, 3998, 4000]
    spent = report["facts"]["tokens"]
    assert spent["prompt"] == sum(len(body["prompt"]) for body in asked)
    assert spent["requests"] == len(asked)


def test_the_cost_is_told_before_and_a_dry_run_sends_no_long_prompt(verify):
    script = Script()
    with serve(script) as url:
        result = verify("--endpoint", url, "--dry-run", lengths="3000,90000")
    assert result.code == 0
    assert "to send: " in result.err
    cost = int(result.err.split("to send: ")[1].split(" prompt tokens")[0].replace(",", ""))
    assert 4 * 93_000 < cost < 7 * 93_000
    assert all(len(body["prompt"]) <= 1000 for path, body, _ in script.requests if "completions" in path)


FAULTS = {
    "third chunk": (
        Script(lose=lambda seen, _: seen.chunks >= 3, chunk=900),
        ["endpoint.garbled", "endpoint.chunk-count"],
    ),
    "length": (Script(lose=lambda seen, _: seen.tokens > 2500), ["endpoint.garbled", "endpoint.length"]),
    "last index_topk": (Script(lose=lambda seen, at: at < seen.tokens - 512), ["endpoint.last-topk"]),
    "length modulo 4": (
        Script(lose=lambda seen, _: seen.tokens > 1200 and seen.tokens % 4 == 3),
        ["endpoint.garbled", "endpoint.length-modulo"],
    ),
    "cache": (Script(lose=lambda seen, _: seen.cached > 0), ["endpoint.cache-state"]),
    "concurrency": (Script(lose=lambda seen, _: seen.together, patience=0.25), ["endpoint.concurrency"]),
    "middle": (Script(lose=lambda seen, at: seen.tokens > 1200 and 0.4 < at / seen.tokens < 0.6), None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_kind_of_fault_is_found_and_named(verify, name):
    script, verdicts = FAULTS[name]
    with serve(script) as url:
        result = verify("--endpoint", url, "--chunk-tokens", "900")
    assert result.code == 1
    assert not result.json["ok"]
    assert result.json["findings"]
    if verdicts is None:
        assert result.verdicts[0] == "endpoint.depth"
    else:
        assert result.verdicts == verdicts
    for verdict in result.json["facts"]["verdicts"]:
        assert verdict["evidence"]
        assert verdict["excludes"]
    if name == "third chunk":
        edge = result.json["facts"]["first_failing"]
        assert edge["passes"] <= 1800 < edge["fails"] <= edge["passes"] + 64
        assert "third chunk of 900 tokens" in result.json["facts"]["verdicts"][1]["statement"]
    if name == "length":
        statement = result.json["facts"]["verdicts"][1]["statement"]
        assert "confounded with length" in statement


@pytest.mark.parametrize(
    ("cache", "why"),
    [({"tells_cached": False}, "does not tell what it cached"), ({"forgets": True}, "the server cached only 0 of")],
    ids=["silent", "empty"],
)
def test_without_a_cache_chunks_are_confounded_with_length(verify, cache, why):
    script = Script(lose=lambda seen, _: seen.chunks >= 3, chunk=900, **cache)
    with serve(script) as url:
        result = verify("--endpoint", url)
    assert result.verdicts == ["endpoint.garbled", "endpoint.length"]
    verdict = result.json["facts"]["verdicts"][1]
    assert "confounded with length" in verdict["statement"]
    assert any(why in text for text in verdict["evidence"])


@pytest.mark.parametrize(
    ("other", "expected", "words", "edges"),
    [
        (
            Script(lose=lambda seen, _: seen.chunks >= 3, chunk=1300),
            "endpoint.chunk-count",
            "third chunk on, on both",
            2,
        ),
        (Script(lose=lambda seen, _: seen.tokens > 1800, chunk=1300), "endpoint.length", "on both endpoints", 2),
        (Script(chunk=1300), "endpoint.chunk-count", "does not fail at any length", 1),
    ],
)
def test_a_second_endpoint_tells_chunk_count_from_length(verify, tmp_path, other, expected, words, edges):
    first = Script(lose=lambda seen, _: seen.chunks >= 3, chunk=900, tells_cached=False)
    with serve(first) as url, serve(other) as second:
        plot = ("--plot", str(tmp_path / "p.svg"))
        result = verify("--endpoint", url, "--endpoint", second, "--chunk-tokens", "900,1300", *plot)
    assert result.code == 1
    picture = (tmp_path / "p.svg").read_text()
    assert picture.count("stroke-dasharray") == edges
    assert "ticks: chunks of 900 and 1,300 tokens" in picture
    assert result.verdicts == ["endpoint.garbled", expected]
    assert words in result.json["facts"]["verdicts"][1]["statement"]


class Lucky(Script):
    """A script whose fault spares the first request of each length (and cache state) for which ``luck`` is true."""

    def __init__(self, luck, lose, **rest):
        first = {}
        super().__init__(
            lose=lambda seen, at: (
                lose(seen, at) and not (luck(seen) and first.setdefault((seen.tokens, seen.cached > 0), seen) is seen)
            ),
            **rest,
        )


def third_chunk(seen, _):
    return seen.chunks >= 3


@pytest.mark.parametrize(
    "luck",
    [
        lambda seen: 1800 < seen.tokens < 2000,  # neighbours and steps of the bisection
        lambda seen: 2600 < seen.tokens < 4000,  # steps on the second server
        lambda seen: seen.tokens == 4000,  # all that was asked of the second server
    ],
    ids=["first edge", "second edge", "second server"],
)
def test_an_answer_that_is_right_by_luck_moves_no_edge(verify, luck):
    first = Lucky(luck, third_chunk, chunk=900, tells_cached=False)
    other = Lucky(luck, third_chunk, chunk=1300, tells_cached=False)
    with serve(first) as url, serve(other) as second:
        result = verify("--endpoint", url, "--endpoint", second, "--chunk-tokens", "900,1300")
    assert result.verdicts == ["endpoint.garbled", "endpoint.chunk-count"]
    assert "third chunk on, on both" in result.json["facts"]["verdicts"][1]["statement"]
    edge = result.json["facts"]["first_failing"]
    assert edge["passes"] <= 1800 < edge["fails"] <= edge["passes"] + 64


@pytest.mark.parametrize(
    "luck", [lambda seen: seen.cached > 0, lambda seen: seen.tokens == 4000 and not seen.cached], ids=["staged", "cold"]
)
def test_an_answer_that_is_right_by_luck_excludes_no_length(verify, luck):
    """Staged prompts that pass once would say that it is not the length; a cold one, that it is the cache."""
    with serve(Lucky(luck, lambda seen, _: seen.tokens > 2500)) as url:
        result = verify("--endpoint", url, "--concurrency", "0", "--chunk-tokens", "900")
    assert result.verdicts == ["endpoint.garbled", "endpoint.length"]


def test_near_the_limit_neighbouring_lengths_are_sought_below(verify):
    script = Script(limit=2403, lose=lambda seen, _: seen.tokens > 1200 and seen.tokens % 4 == 3)
    with serve(script) as url:
        result = verify("--endpoint", url, "--concurrency", "0", lengths=None)
    assert result.json["facts"]["lengths"] == [1001, 2003]
    assert result.verdicts == ["endpoint.garbled", "endpoint.length-modulo"]
    assert result.json["facts"]["complete"]


def test_a_second_endpoint_that_takes_less_cannot_be_compared(verify):
    first = Script(lose=lambda seen, _: seen.tokens > 1800)
    with serve(first) as url, serve(Script(limit=1800)) as second:
        result = verify("--endpoint", url, "--endpoint", second, "--concurrency", "0", lengths="2000")
    assert result.code == 1
    assert "the second endpoint takes 1,400 tokens, too few" in result.json["facts"]["stopped"]


def test_a_fault_that_comes_and_goes_is_named_so(verify):
    lost = iter([True])
    script = Script(lose=lambda seen, at: seen.tokens == 2000 and at > 1900 and next(lost, False))
    with serve(script) as url:
        result = verify("--endpoint", url)
    assert result.code == 1
    assert result.verdicts == ["endpoint.intermittent"]


@pytest.mark.parametrize(
    ("script", "mode"),
    [
        (Script(tokenizes=False), "completions, text"),
        (Script(completions=False), "chat, thinking off"),
        (Script(completions=False, tokenizes=False, split_digits=True), "chat, thinking off"),
        (Script(completions=False, extras=False, thinks=True), "chat"),
        (Script(extras=False), "completions, token ids"),
    ],
)
def test_servers_that_offer_less_are_checked_too_at_exact_lengths(verify, script, mode):
    with serve(script) as url:
        result = verify("--endpoint", url, "--concurrency", "1", lengths="2001")
    assert result.code == 0
    assert result.json["facts"]["servers"][0]["mode"] == mode
    by_probe = {case["probe"]: case["prompt_tokens"] for case in result.json["cases"]}
    assert (by_probe["0:cold/2001/0"], by_probe["0:prefix/2000/of-2001/0"]) == (2001, 2000)


def test_thinking_that_uses_up_its_allowance_is_no_fault(verify):
    with serve(Script(completions=False, extras=False, thinks=True)) as url:
        result = verify("--endpoint", url, "--thinking-tokens", "50", lengths="2000")
    assert result.code == 3
    assert "Raise --thinking-tokens" in result.err


def test_a_server_without_any_count_cannot_be_checked(verify):
    with serve(Script(counts=False, tokenizes=False)) as url:
        result = verify("--endpoint", url)
    assert result.code == 3
    assert "counts no tokens" in result.err


def test_a_server_that_counts_only_on_request_leaves_the_lengths_unproved(verify):
    with serve(Script(counts=False)) as url:
        result = verify("--endpoint", url)
    assert result.code == 0
    assert any("the server counts no tokens" in text for text in result.json["not_proved"])


def long_ones(answer):
    """Refuse prompts above 1,500 tokens with this answer."""
    return lambda path, body, _number: answer if "completions" in path and len(body["prompt"]) > 1500 else None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((500, b'{"error": "EngineDeadError"}'), "http-500"),
        ((429, b"busy"), "http-429"),
        ((400, b'{"error": "maximum context length is 1500"}'), "http-400"),
        ((200, b'{"choices": []}'), "garbage"),
        ((200, b'{"choices": [{"text": 7}]}'), "garbage"),
        ((200, b"data: {}\n\n"), "garbage"),
        ((200, b'{"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 1024}}'), "truncated"),
    ],
)
def test_long_prompts_that_get_no_answer_are_not_checked_and_no_fault(verify, answer, kind):
    with serve(Script(refuse=long_ones(answer))) as url:
        result = verify("--endpoint", url, "--retries", "0", lengths="2000")
    assert result.code == 3
    assert not result.json["ok"]
    assert result.json["findings"] == []
    assert {one["failure"] for one in result.json["facts"]["unanswered"]} == {kind}
    told = [text for text in result.json["not_proved"] if f": {kind}: " in text and "not asked" not in text]
    assert told
    assert all(("although it tells a limit of 131,072 tokens" in text) == (kind == "http-400") for text in told)


@pytest.mark.parametrize("body", [b'{"data": 5}', b"[]", b'{"data": [{"id": 3}]}', b"null"])
def test_a_model_list_of_rubbish_is_a_usage_error_and_no_crash(verify, body):
    script = Script(refuse=lambda path, _body, _number: (200, body) if path.endswith("/models") else None)
    with serve(script) as url:
        result = verify("--endpoint", url)
    assert result.code == 2
    assert "--model" in result.err


def test_nothing_there_and_a_refused_key_exit_3(verify, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    script = Script(refuse=lambda *_: (401, b"invalid key " + KEY.encode()))
    with serve(script) as url:
        refused = verify("--endpoint", url, "--api-key-env", "MY_KEY")
    gone = verify("--endpoint", url)
    assert (refused.code, gone.code) == (3, 3)
    assert "--api-key-env" in refused.err
    assert KEY not in refused.err
    assert "unreachable" in gone.err
    unset = verify("--endpoint", url, "--api-key-env", "NO_SUCH_KEY")
    assert unset.code == 2


def test_each_key_goes_to_its_own_endpoint_alone(verify, monkeypatch):
    monkeypatch.setenv("KEY_1", KEY)
    monkeypatch.setenv("KEY_2", "other")
    first, second = Script(), Script()
    with serve(first) as url, serve(second) as other:
        both = ("--endpoint", url, "--endpoint", other, "--api-key-env", "KEY_1")
        verify(*both, lengths="1500")
        assert {headers.get("Authorization") for _, _, headers in first.requests} == {f"Bearer {KEY}"}
        assert {headers.get("Authorization") for _, _, headers in second.requests} == {None}
        second.requests.clear()
        verify(*both, "--api-key-env", "KEY_2", "--dry-run", lengths="1500")
        assert {headers.get("Authorization") for _, _, headers in second.requests} == {"Bearer other"}
        assert verify(*both, *["--api-key-env", "KEY_2"] * 2).code == 2


def test_an_answer_cut_at_its_allowance_is_named_so(verify):
    with serve(Script()) as url:
        result = verify("--endpoint", url, "--answer-tokens", "20", "--api", "completions", lengths="2000")
    assert result.code == 3
    assert "cut at the allowance of --answer-tokens" in result.err


def test_a_model_that_cannot_do_it_short_is_not_judged_long(verify):
    with serve(Script(lose=lambda *_: True)) as url:
        result = verify("--endpoint", url)
    assert result.code == 3
    assert "length cannot be judged" in result.err


def test_a_weak_model_passes_only_with_its_own_measure(verify):
    weak = Script(lose=lambda seen, at: seen.tokens > 1200 and at < 100)
    with serve(weak) as url:
        assert verify("--endpoint", url, lengths="2000").code == 1
        assert verify("--endpoint", url, "--min-recall", "0.9", lengths="2000").code == 0


def test_the_budget_is_a_bound_and_the_report_is_partial(verify, tmp_path):
    script, junit = Script(), tmp_path / "j.xml"
    with serve(script) as url:
        result = verify("--endpoint", url, "--budget-tokens", "12000", "--junit", str(junit))
    assert result.code == 3
    assert not result.json["facts"]["complete"]
    assert "--budget-tokens 12,000 is used up" in result.json["facts"]["stopped"]
    spent = sum(len(body["prompt"]) + body["max_tokens"] for path, body, _ in script.requests if "completions" in path)
    assert spent <= 12_000 + 400 * 8
    tokens = result.json["facts"]["tokens"]
    assert tokens["prompt"] + tokens["completion"] <= 12_000
    assert result.json["checks"]
    written = ET.parse(junit)  # noqa: S314 - our own file
    errors = [error.get("message") for error in written.iter("error")]
    assert errors
    assert all("--budget-tokens 12,000 is used up" in message for message in errors)
    assert written.getroot().get("errors") == str(len(errors))
    assert len(written.findall(".//testcase")) == len(result.json["checks"]) + len(errors)


def test_a_fault_found_just_before_the_budget_ends_is_reported(verify):
    with serve(Script(lose=lambda seen, _: seen.tokens > 1500)) as url:
        result = verify("--endpoint", url, "--budget-tokens", "5200", lengths="2000")
    assert result.json["facts"]["stopped"]
    assert [case["probe"] for case in result.json["cases"]][-1] == "0:cold/2000/0"
    assert result.code == 1
    assert result.json["findings"]


def test_a_run_goes_on_where_it_stopped_and_asks_nothing_twice(verify, tmp_path):
    saved = tmp_path / "run.json"
    script = Script()
    with serve(script) as url:
        stopped = verify("--endpoint", url, "--save", str(saved), "--budget-tokens", "12000")
        known = {key for key, one in json.loads(saved.read_text())["outcomes"].items() if "baseline" not in key}
        before = len(script.requests)
        refused = verify("--endpoint", url, "--save", str(saved))
        other = verify("--endpoint", url, "--save", str(saved), "--resume", lengths="2000,5000")
        whole = verify("--endpoint", url, "--save", str(saved), "--resume", lengths=None)
    assert (stopped.code, refused.code, other.code, whole.code) == (3, 2, 2, 0)
    assert "--resume" in refused.err
    assert "lengths [2000, 4000]" in other.err
    assert known
    asked = [len(body["prompt"]) for path, body, _ in script.requests[before:] if "completions" in path]
    assert 2000 not in asked
    assert 4000 in asked
    final = json.loads(saved.read_text())
    assert len(final["outcomes"]) > len(known)
    assert list(tmp_path.iterdir()) == [saved]


def test_a_run_is_not_resumed_on_another_kind_of_server_and_its_file_is_left_alone(verify, tmp_path):
    saved = tmp_path / "run.json"
    with serve(Script()) as url:
        verify("--endpoint", url, "--save", str(saved), "--budget-tokens", "20000")
    before = saved.read_bytes()
    with serve(Script(tokenizes=False)) as url:
        other = verify("--endpoint", url, "--save", str(saved), "--resume")
    assert other.code == 2
    assert "mode" in other.err
    assert saved.read_bytes() == before


def test_a_folder_that_vanishes_costs_the_file_and_not_the_result(verify, tmp_path):
    folder = tmp_path / "folder"

    def vanish(path, body, _number):
        if "completions" in path and len(body["prompt"]) == 2000:
            shutil.rmtree(folder, ignore_errors=True)

    for option, code in (("--save", 3), ("--report", 2)):
        folder.mkdir()
        with serve(Script(refuse=vanish)) as url:
            result = verify("--endpoint", url, option, str(folder / "file"), lengths="2000")
        assert result.code == code
        assert result.json["checks"]
        assert str(folder) in result.out + result.err


def test_cold_prompts_that_came_from_a_cache_prove_nothing_cold(verify):
    with serve(Script()) as url:
        first, again = (
            verify("--endpoint", url, "--seed", "5", "--concurrency", "0", lengths="2000") for _ in range(2)
        )
    assert (first.code, again.code) == (0, 0)
    assert any(line.startswith("cold (new prompts)") for line in first.json["proved"])
    assert not any(line.startswith("cold") for line in again.json["proved"])
    assert any("cold prefill at 1,024, 2,000 tokens" in line for line in again.json["not_proved"])


def test_two_runs_are_compared_prompt_by_prompt(verify, tmp_path):
    saved, report = tmp_path / "before.json", tmp_path / "report.md"
    with serve(Script(lose=lambda seen, _: seen.tokens > 3000)) as url:
        assert verify("--endpoint", url, "--save", str(saved)).code == 1
    with serve(Script(jitter=lambda number: number * 1e-4)) as url:
        result = verify("--endpoint", url, "--against", str(saved), "--report", str(report), lengths=None)
    assert result.code == 0
    compared = {one["key"]: one for one in result.json["facts"]["against"]}
    assert compared["0:cold/4000/0"]["facts"] == "gained"
    assert compared["0:cold/4000/0"]["first_token"] == 2
    assert compared["0:cold/2000/0"]["facts"] == "same"
    assert compared["0:cold/2000/0"]["first_token"] is None
    assert 0 < compared["0:cold/2000/0"]["logprob_gap"] < 0.1
    assert "gained" in report.read_text()


def test_a_saved_file_that_is_none_is_refused(verify, tmp_path):
    file = tmp_path / "x.json"
    for content in ("{}", "[]", "no", '{"schema": "other/1"}', "[" * 100_000):
        file.write_text(content)
        assert verify("--endpoint", "http://127.0.0.1:9", "--against", str(file)).code == 2
    assert verify("--endpoint", "http://127.0.0.1:9", "--against", str(tmp_path / "none")).code == 2


def test_reports_tell_no_secret_and_no_text_unless_asked(verify, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    saved, report, plot, junit = (tmp_path / name for name in ("s.json", "r.md", "p.svg", "j.xml"))
    script = Script(lose=lambda seen, _: seen.tokens > 2500)
    files = ["--save", str(saved), "--report", str(report), "--plot", str(plot), "--junit", str(junit)]
    with serve(script) as url:
        result = verify("--endpoint", url, "--api-key-env", "MY_KEY", *files, form="human")
        port = url.rsplit(":", 1)[1]
    assert result.code == 1
    assert any(headers.get("Authorization") == f"Bearer {KEY}" for _, _, headers in script.requests)
    written = [result.out, result.err, *(file.read_text() for file in (saved, report, plot, junit))]
    values = [
        line.split()[-1]
        for one in json.loads(saved.read_text())["outcomes"].values()
        for line in one["text"].splitlines()
    ]
    assert not any(KEY in text or port in text for text in written)
    assert not any(value in report.read_text() + plot.read_text() for value in values if value != "xx")
    assert "endpoint.length" in report.read_text()
    root = ET.fromstring(plot.read_text())  # noqa: S314 - our own file
    assert root.tag.endswith("svg")
    counts = ET.parse(junit).getroot().attrib  # noqa: S314
    assert (counts["failures"], counts["errors"], counts["skipped"]) == ("2", "0", "2")
    with serve(Script()) as url:
        verify("--endpoint", url, "--report", str(report), "--with-text")
    assert "0:cold/2000/0:" in report.read_text()


def test_a_healthy_server_that_is_not_reproducible_raises_no_alarm(verify):
    source, server_s_own = random.Random(5), random.Random(6)  # the server draws in threads, in any order
    for _ in range(25):
        script = Script(
            jitter=lambda _number: server_s_own.random() * 1e-3,
            separator=lambda: server_s_own.choice([": ", " is ", " - "]),  # near-ties fall either way, values stand
            chunk=source.choice([256, 2048, 8192]),
            tokenizes=source.random() < 0.7,
            completions=source.random() < 0.7,
            tells_cached=source.random() < 0.7,
        )
        beside = ("--concurrency", str(source.randrange(3)))
        with serve(script) as url:
            result = verify("--endpoint", url, *beside, lengths=str(source.randrange(700, 2600)))
        assert result.code == 0
        assert result.verdicts == []
        assert result.json["facts"]["not_reproducible"]


def test_the_picture_of_the_terminal_shows_depths_and_the_verdict(verify):
    with serve(Script(lose=lambda seen, at: at < seen.tokens - 512)) as url:
        result = verify("--endpoint", url, form="human")
    row = next(line for line in result.out.splitlines() if "2,000" in line and "cold" in line)
    assert row.index("□") < row.index("■")
    assert "Only facts in the last 512 tokens survive" in result.out
    assert "FAULT: facts are lost" in result.out
    assert "■ all recalled" in result.out
    letters = {line.split()[0]: line.split()[-1] for line in result.out.splitlines() if line.lstrip()[:1].isdecimal()}
    assert letters == {"512": "11/11", "1,024": "6/11", "2,000": "A", "4,000": "A"}
    assert "tokens cold: " in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--timeout", "nan"],
        ["--min-recall", "1.5"],
        ["--budget-tokens", "0"],
        ["--plot", "picture.png"],
        ["--save", "/no/such/folder/x"],
        ["--chunk-tokens", "1,2"],
        ["--engine", "vllm"],
        ["--all-rows"],
        ["--self-test"],
        ["--quick"],
        ["--tp", "1"],
        ["--device", "cpu"],
        ["--backend", "eager"],
        ["--lengths", "9" * 5000],
        ["--endpoint", "http://b", "--endpoint", "http://c"],
    ],
)
def test_wrong_usage_is_told_before_anything_is_sent(verify, arguments):
    result = verify("--endpoint", "http://127.0.0.1:9", *arguments)
    assert result.code == 2
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--budget-tokens", "9"], ["--resume"], ["--timeout", "1"], ["--save", "x"]])
def test_its_options_mean_nothing_without_an_endpoint(verify, arguments):
    result = verify(*arguments)
    assert result.code == 2
    assert "needs --endpoint URL beside it" in result.err


def test_answers_in_a_report_cannot_move_a_terminal_s_cursor(verify, tmp_path):
    report = tmp_path / "report.md"
    with serve(Script(separator=lambda: ":\x1b[2J ")) as url:
        assert verify("--endpoint", url, "--report", str(report), "--with-text", lengths="1200").code == 0
    assert "\x1b" not in report.read_text()
    assert "[2J" in report.read_text()


def test_a_hanging_server_times_out_and_ctrl_c_leaves_a_partial_report(tmp_path):
    released, hanging = threading.Event(), iter(range(2))  # once in each run; the second goes on with errors

    def refuse(path, body, _number):
        if "completions" not in path or len(body["prompt"]) <= 3000:
            return None
        if next(hanging, None) is not None:
            released.wait(120)
        return 500, b"dead"

    hang = Script(refuse=refuse)
    saved = tmp_path / "run.json"
    code = "import sys; from sparse_mla.cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    with serve(hang) as url:
        command = [
            sys.executable,
            "-c",
            code,
            "verify",
            "--endpoint",
            url,
            "--lengths",
            "2000,4000",
            "--index-topk",
            "512",
        ]
        command += ["--json", "--save", str(saved)]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as child:
            until = time.monotonic() + 60
            while time.monotonic() < until and not (saved.exists() and "concurrent/1997" in saved.read_text()):
                time.sleep(0.05)
            time.sleep(0.3)
            child.send_signal(signal.SIGINT)
            began = time.monotonic()
            out, err = child.communicate(timeout=60)
        assert time.monotonic() - began < 30
        impatient = [*command[:-2], "--timeout", "4", "--retries", "0"]
        timed_out = subprocess.run(impatient, capture_output=True, text=True, env=environment, check=False)
        released.set()
    assert child.returncode == 130, err
    report = json.loads(out)
    assert report["facts"]["stopped"] == "interrupted"
    assert report["checks"]
    assert "Traceback" not in err
    assert timed_out.returncode == 3
    report = json.loads(timed_out.stdout)
    assert [one["failure"] for one in report["facts"]["unanswered"]] == ["timeout", "http-500", "http-500"]


def test_it_needs_the_standard_library_and_rich_alone():
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'matplotlib', 'requests', 'httpx', 'openai', 'vllm', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "from sparse_mla.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    with serve(Script()) as url:
        command = [
            sys.executable,
            "-c",
            code,
            "verify",
            "--endpoint",
            url,
            "--lengths",
            "2000",
            "--proxy",
            "none",
            "-q",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
