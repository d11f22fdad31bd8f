"""Programs end with a signal, also in other threads, and also while they are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core import proc
from pipeline.core.files import on_all_cores


def test_ctrl_c_ends_the_programs_of_all_threads(tmp_path: Path) -> None:
    ended: dict[int, int] = {}

    def work(number: int) -> None:
        if number == 2:
            # as Ctrl-C, once both others run
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt
        script = f"touch {tmp_path}/{number}; exec sleep 60"
        ended[number] = proc.read(["sh", "-c", script]).returncode

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        on_all_cores(work, [2, 0, 1], proc.end_reads, jobs=3)
    assert ended == {0: -9, 1: -9}
    assert time.monotonic() - start < 30


def test_programs_that_have_ended_are_let_be() -> None:
    assert proc.read(["true"]).returncode == 0
    with pytest.raises(subprocess.TimeoutExpired):
        proc.read(["sleep", "60"], timeout_s=0.1)
    proc.end_reads()
    assert proc.read(["true"]).returncode == 0


def _read(words: list[str]) -> None:
    proc.read(words)


def _running(words: list[str]) -> None:
    with proc.running(words, env=os.environ):
        pytest.fail("it went on")


def _talk(words: list[str]) -> None:
    proc.talk(words, env=os.environ)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("start", [_read, _running, _talk])
def test_a_signal_amid_a_start_ends_what_is_started(
    start: Callable[[list[str]], None], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            started.append(self)
            # as one that comes before the caller has it
            signal.raise_signal(number)

    before = signal.signal(number, signal.default_int_handler)
    monkeypatch.setattr(subprocess, "Popen", Popen)
    try:
        with pytest.raises(KeyboardInterrupt):
            start(["sleep", "60"])
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_a_child_ignores_what_we_ignore() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT).name)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert proc.read([sys.executable, "-c", code]).stdout == b"SIG_IGN\n"
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("one\n two \n\n", "two"),
        ("docker: no card\n\nRun 'docker run --help' for more information\n", "docker: no card"),
        ("docker: no card\nSee 'docker run --help'.\n", "docker: no card"),
        ("See docker's help\n", "See docker's help"),
        (" \n", "no output"),
        ("Run 'docker run --help' for more information\n", "no output"),
    ],
)
def test_the_last_line_is_the_reason_and_not_a_pointer_to_help(output: str, line: str) -> None:
    assert proc.last_line(output) == line
