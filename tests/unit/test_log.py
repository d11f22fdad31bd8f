from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from pipeline.core import log


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [100.0]
    monkeypatch.setattr("pipeline.core.log.time.monotonic", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1234567, "1.2 MB"), (4.8e9, "4.80 GB")],
)
def test_sizes_are_written_as_download_pages_do(number: float, text: str) -> None:
    assert log.size(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (3.14, "3.1 s"),
        (75, "1 min 15 s"),
        (3599.9, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (90_061, "25 h 1 min"),
    ],
)
def test_seconds_become_minutes_and_minutes_hours(number: float, text: str) -> None:
    assert log.seconds(number) == text


def test_progress_for_a_log_is_a_line_now_and_then(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = log.LineBar("fetched", 1000)
    bar.advance(100)
    assert capsys.readouterr().err == ""
    clock(10)
    bar.advance(100)
    assert capsys.readouterr().err == "  fetched: 200 B of 1.0 kB, 20 B/s, 40.0 s left\n"


def test_the_time_left_follows_from_the_recent_rate(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = log.LineBar("fetched", 100_000)
    for _ in range(10):
        clock(10)
        bar.advance(9000)
    # a hundred seconds at 900 B/s; then the line is ten times as slow
    for _ in range(10):
        clock(10)
        bar.advance(900)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "  fetched: 99.0 kB of 100.0 kB, 90 B/s, 11.1 s left"


def test_a_silent_step_says_that_it_goes_on_and_ever_more_seldom(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    silence = log.StillWorking("Unpacking")
    said = []
    for second in range(1, 201):
        clock(1)
        silence.look()
        if line := capsys.readouterr().err:
            said.append((second, line))
    assert [second for second, _ in said] == [10, 30, 70, 130, 190]
    assert said[2][1] == "  Unpacking: still working after 1 min 10 s\n"


def test_a_step_that_says_something_else_is_not_silent(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    silence = log.StillWorking("Unpacking")
    for _ in range(10):
        clock(8)
        log.say("a line of its own")
        silence.look()
    assert "still" not in capsys.readouterr().err


def test_a_program_that_prints_is_named_by_what_it_does_now(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    task = [""]
    silence = log.StillWorking(lambda: task[0], 30.0)
    said = []
    # a password is asked for, a task that takes long, one that prints, and one that takes long
    for second in range(1, 301):
        clock(1)
        task[0] = "" if second < 60 else "first" if second < 160 else "second"
        if 160 <= second < 260:
            log.heard()
        silence.look()
        said += [(second, line) for line in capsys.readouterr().err.splitlines()]
    assert said == [
        (90, "  first: still working after 30.0 s"),
        (150, "  first: still working after 1 min 30 s"),
        (289, "  second: still working after 2 min 9 s"),
    ]


def test_a_step_looks_for_its_own_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = threading.Event()
    monkeypatch.setattr(log.StillWorking, "look", lambda silence: looked.set())
    with log.step("Unpacking"):
        assert looked.wait(30)
    looked.clear()
    # and no longer than it lasts
    assert not looked.wait(1.5)


def test_what_is_quick_and_only_watched_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with log.watched("Stating"):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("steps", [[-50], [100, -100], [100, -300, 50], [2000]])
def test_bytes_that_are_taken_back_break_nothing(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str], steps: list[int]
) -> None:
    bar = log.LineBar("fetched", 1000)
    for step in steps:
        clock(6)
        bar.advance(step)
    assert "-" not in capsys.readouterr().err


def test_no_time_passed_is_no_division_by_zero(
    clock: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(log, "QUIET_LINE_EVERY_S", 0)
    log.LineBar("fetched", 10).advance(5)
    assert capsys.readouterr().err == ""


def test_a_live_bar_counts_right_from_many_threads() -> None:
    with Progress(console=Console(quiet=True), disable=False) as live:
        task = live.add_task("fetched", total=1000)
        bar = log.RichBar(live, task)

        def work() -> None:
            for _ in range(200):
                bar.advance(3)
                bar.advance(-2)

        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert live.tasks[0].completed == 1000
        bar.advance(-1000)
        assert (live.tasks[0].speed or 0) >= 0


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_quiet(True)
    with log.step("Working"), log.progress("fetched", 10) as bar:
        bar.advance(10)
    assert capsys.readouterr() == ("", "")


def test_a_step_says_what_begins_and_how_long_it_took(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with log.step("Working"):
        clock(2)
    assert capsys.readouterr().err == "Working\n  done in 2.0 s\n"


def test_a_table_is_aligned() -> None:
    text = log.table(["a", "bb"], [["ccc", "d"]])
    assert text.splitlines() == ["a    bb", "---  --", "ccc  d"]


DIGEST = f"sha256:{'0123456789ab' * 5}cdef"
HEAD = ["image", "digest", "why"]
ROWS: list[list[str | None]] = [
    ["sglang", DIGEST, "a reason of several words"],
    ["vllm", None, "/a/path/of-one-word"],
]


def shown_on(width: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("sys.stdout.isatty", lambda: width is not None)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width or 12))
    return log.table(HEAD, ROWS).splitlines()


@pytest.mark.parametrize("width", [None, 120])
def test_a_table_that_fits_or_that_a_program_reads_has_whole_digests(
    monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    assert DIGEST in shown_on(width, monkeypatch)[2]


def test_a_table_that_is_too_wide_for_a_terminal_has_short_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = shown_on(80, monkeypatch)
    assert lines[2] == "sglang  sha256:0123456789ab…  a reason of several words"
    assert max(map(len, lines)) <= 80


def test_a_table_that_is_still_too_wide_has_its_last_column_below(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown_on(40, monkeypatch) == [
        "image   digest",
        "    why",
        "------  --------------------",
        "sglang  sha256:0123456789ab…",
        "    a reason of several words",
        "vllm    -",
        "    /a/path/of-one-word",
    ]
    # a path is left whole, however narrow the terminal is
    assert shown_on(12, monkeypatch)[-1] == "    /a/path/of-one-word"


def test_an_unheard_word_is_no_failure_and_later_ones_go_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    place = tmp_path / "stderr"
    with place.open("w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with monkeypatch.context() as patch:
            patch.setattr("builtins.print", broken)
            log.say("hello")
        log.say("later")
    assert place.read_text() == ""


def test_things_that_take_long_are_counted_with_the_time_left_by_the_last_of_them(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = log.CountLine(30, "case")
    clock(100)  # a slow start, which says nothing about the rest
    bar.advance(1)
    assert capsys.readouterr().err == "  1 of 30 cases, about 48 min 20 s left\n"
    for _ in range(9):
        clock(4)
        bar.advance(1)
    assert capsys.readouterr().err.endswith("9 of 30 cases, about 1 min 24 s left\n")


def test_what_does_not_move_is_said_again_after_a_while(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    bar = log.CountLine(2, "case")
    for _ in range(6):
        clock(5)
        bar.advance(0)
    assert capsys.readouterr().err == "  0 of 2 cases\n"
    bar.advance(2)
    clock(6)
    bar.advance(-1)
    bar.advance(0)
    assert capsys.readouterr().err == "  1 of 2 cases, about 36.0 s left\n"


def test_nothing_is_counted_aloud_when_quiet(
    clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    log.set_quiet(True)
    with log.counting(2, "case") as bar:
        clock(60)
        bar.advance(1)
    log.set_quiet(False)
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest captures anew after those."""
    screen = Terminal()
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    return screen


def test_verdicts_have_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    assert log.coloured("failed") == "\x1b[31mfailed\x1b[0m"
    assert log.coloured("valid") == "\x1b[32mvalid\x1b[0m"
    assert log.coloured("a valid plan") == "a valid plan", "a word of a sentence is no verdict"
    rows = log.table(["case", "verdict", "kernel"], [["failed-before", "passed", "k"]])
    assert rows.splitlines()[-1] == "failed-before  \x1b[32mpassed \x1b[0m  k"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_none(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setenv(name, value)
    assert log.coloured("failed") == "failed"
    assert "\x1b" not in log.table(["verdict"], [["failed"]])


def test_a_pipe_gets_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert log.coloured("failed") == "failed"
    assert log.coloured("sm120:", "failed", sys.stderr) != "sm120:"


@pytest.mark.parametrize("kind", ["progress", "counting"])
def test_both_live_bars_label_their_times_and_their_clock_goes_on_at_the_total(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    terminal = on_a_terminal(monkeypatch)
    with log.progress("read", 10) if kind == "progress" else log.counting(10, "case") as bar:
        bar.advance(5)
        time.sleep(0.3)
        bar.advance(5)
        time.sleep(1.2)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    clocks = [float(found) for found in re.findall(r"([0-9.]+) s so far, finishing", text)]
    assert clocks[-1] - clocks[0] >= 0.4, "rich's own clock stops at the total"
