"""`sm120 bench` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.app.bench import changed_workload
from pipeline.serving.bench.plan import cells_of
from pipeline.serving.bench.record import read_run
from pipeline.serving.bench.workload import read_workload
from tests.testbed.bench_faults import bench_server
from tests.unit.support import ROOT, Command

_SMALL = ("--concurrency", "2", "--requests", "4", "--input-tokens", "60", "--output-tokens", "5")
_FAST = ("--repeats", "1", "--no-self-test")


def test_the_first_line_comes_before_the_modules_that_take_seconds_to_load() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "pipeline", "bench"]
    ended = subprocess.run(
        [*command, "http://127.0.0.1:9"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = [line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()]
    first = lines.index("Preparing to measure")
    slow = ("pydantic", "pipeline.serving.bench.runner", "pipeline.app.serve")
    assert [name for name in slow if lines.index(name) < first] == []


def test_the_help_of_bench_is_its_help_alone(sm120: Command) -> None:
    for more in (("--help",), ("run", "-h"), ("list",)):
        assert sm120("bench", *more).err == ""


def test_the_word_run_may_be_left_out(sm120: Command, tmp_path: Path) -> None:
    with bench_server() as server:
        done = sm120("bench", server.url, *_SMALL, *_FAST, "--output", str(tmp_path))
    assert done.code == 0
    assert "output tok/s" in done.out
    assert "one trial, which says nothing of its error" in done.out
    assert "confidence" not in done.out
    run = read_run(tmp_path / "quick")
    assert run.state == "complete"
    assert run.cells[0].trials[0].metrics.completed == 4


def test_options_may_come_before_the_target(sm120: Command, tmp_path: Path) -> None:
    words = (*_SMALL, "--output", str(tmp_path / "out"), "http://127.0.0.1:9")
    assert sm120("bench", *words).error == "BenchUnanswered"
    wrong = sm120("bench", "--no-such-thing", "http://127.0.0.1:9")
    assert wrong.code == 2
    assert "--no-such-thing" in wrong.err
    assert "compare" in sm120("bench", "--help").out


def test_a_run_of_another_workload_in_the_folder_is_left_alone(
    sm120: Command, tmp_path: Path
) -> None:
    with bench_server() as server:
        words = ("bench", server.url, *_SMALL, *_FAST, "--output", str(tmp_path))
        assert sm120(*words).code == 0
        before = (tmp_path / "quick" / "bench.json").read_bytes()
        assert sm120(*words, "--requests", "5").error == "RunInvalid"
    assert (tmp_path / "quick" / "bench.json").read_bytes() == before


def test_a_void_cell_ends_with_a_code_of_its_own_and_the_result_is_kept(
    sm120: Command, tmp_path: Path
) -> None:
    with bench_server("malformed") as server:
        done = sm120(
            "bench", "run", server.url, *_SMALL, *_FAST, "--json", "--output", str(tmp_path)
        )
    assert done.code == 93
    assert json.loads(done.out)[0]["cells"][0]["state"] == "void"
    assert "c2" in done.err
    assert read_run(tmp_path / "quick").cells[0].state == "void"


def test_a_cell_that_is_void_for_loops_alone_names_what_allows_them(
    sm120: Command, tmp_path: Path
) -> None:
    long = (
        "--concurrency",
        "2",
        "--requests",
        "4",
        "--input-tokens",
        "60",
        "--output-tokens",
        "30",
    )
    with bench_server("loops") as server:
        words = ("bench", server.url, *long, *_FAST, "--output", str(tmp_path))
        done = sm120(*words)
        assert done.code == 93
        assert "--allow-loops" in done.err
        assert sm120(*words, "--allow-loops", "--output", str(tmp_path / "marked")).code == 0
    with bench_server("malformed") as server:
        failed = sm120("bench", server.url, *_SMALL, *_FAST, "--output", str(tmp_path / "failed"))
    assert failed.code == 93
    assert "--allow-loops" not in failed.err


def test_a_mark_of_every_trial_is_said_once(sm120: Command, tmp_path: Path) -> None:
    with bench_server("short") as server:
        words = ("--repeats", "2", "--no-self-test", "--output", str(tmp_path))
        out = sm120("bench", server.url, *_SMALL, *words).out
    marks = [line for line in out.splitlines() if line.startswith("c2: short-answers")]
    assert marks == [
        "c2: short-answers in 2 of 2 trials, the first:"
        " 4 of 4 answers with fewer tokens than were asked for"
    ]
    assert "means of 2 trials with 95 % confidence" in out


def test_workloads_are_listed(sm120: Command) -> None:
    assert "k2-thinking-256-100" in sm120("bench", "list").out
    names = [each["name"] for each in json.loads(sm120("bench", "list", "--json").out)]
    assert "long-8192-2048" in names


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("http://127.0.0.1:9",), 93),
        (("http://127.0.0.1:9", "--workload", "none"), 10),
        (("http://127.0.0.1:9", "--workload", "missing.yaml"), 10),
        (("http://127.0.0.1:9", "--workload", "start"), 10),
        (("http://127.0.0.1:9", "--concurrency", "1", "--rate", "1"), 10),
        (("http://127.0.0.1:9", "--concurrency", "0"), 2),
        (("http://127.0.0.1:9", "--rate", "none"), 2),
        (("ftp://host",), 10),
        (("no-such-recipe",), 41),
    ],
)
def test_what_cannot_be_measured_is_said(
    sm120: Command, tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    done = sm120("bench", *words, "--output", str(tmp_path))
    assert done.code == code
    assert not (tmp_path / "quick" / "bench.json").exists()


@pytest.mark.parametrize("text", ["", "{}", "host facts"])
def test_a_file_without_facts_does_not_stand_for_a_host(
    sm120: Command, tmp_path: Path, text: str
) -> None:
    (tmp_path / "facts.json").write_text(text)
    words = ("--host-facts", str(tmp_path / "facts.json"), "--output", str(tmp_path / "out"))
    assert sm120("bench", "http://127.0.0.1:9", *words).error == "FactsUnreadable"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("typed", "summary"),
    [
        ({"input_tokens": 100, "output_tokens": 64}, "100 tokens in and 64 out"),
        ({"concurrency": [2, 8]}, "256 tokens in and 128 out, concurrency 2, 8"),
        ({"rate": [0.5]}, "256 tokens in and 128 out, 0.5 requests a second"),
    ],
)
def test_what_was_typed_replaces_what_the_workload_says_of_itself(
    typed: dict[str, Any], summary: str
) -> None:
    assert changed_workload(read_workload("quick"), **typed).summary == f"quick with {summary}"


def test_repeats_leave_the_workloads_own_words() -> None:
    quick = read_workload("quick")
    assert changed_workload(quick, repeats=5, requests=7).summary == quick.summary


def test_more_streams_than_requests_are_shown_as_what_they_are() -> None:
    (cell,) = cells_of(changed_workload(read_workload("quick"), concurrency=[32], requests=16))
    assert cell.name == "c16"


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (None, "trace.jsonl: is not there"),
        ("{}", "trace.jsonl, line 1: "),
        (
            '{"timestamp": 0, "input_length": 64, "output_length": 5, "hash_ids": [0, 1]}',
            "a block (",
        ),
        (
            '{"timestamp": 0, "input_length": 64, "output_length": 5, "hash_ids": [0]}',
            "trace.jsonl: has 1 session, 2 are asked for",
        ),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_before_anything_is_asked_or_written(
    sm120: Command, tmp_path: Path, trace: str | None, message: str
) -> None:
    workload = tmp_path / "replay.yaml"
    workload.write_text(
        "name: replay\nsummary: Two sessions of one turn each\n"
        "prompts: {kind: trace, path: trace.jsonl, block_tokens: 64}\n"
        "loads: [{concurrency: 1, requests: 2}]\n"
    )
    if trace:
        (tmp_path / "trace.jsonl").write_text(f"{trace}\n")
    out = tmp_path / "out"
    ended = sm120("bench", "http://127.0.0.1:9", "--workload", workload, "--output", out)
    assert (ended.error, ended.code) == ("WorkloadInvalid", 10)
    assert message in ended.err
    assert not out.exists()
