"""The system's programs: run to their end, or kept running until a block ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tests.testbed.packages import CannotHave, find_program, system_environment

Sign = TypeVar("Sign")


def run_program(name: str, *args: str, cwd: Path | None = None) -> str:
    """What a program prints; a refusal means that this machine cannot have what it is for."""
    done = subprocess.run(
        [find_program(name), *args],
        cwd=cwd,
        env=system_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        shown = " ".join([name, *args])[:60]
        raise CannotHave(f"`{shown}` fails here: {last_line(done.stderr)}")
    return done.stdout


@contextmanager
def daemon(
    command: Sequence[str], log_file: Path, stop_timeout_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its words in a file; asked to stop when the block ends, then made to."""
    # a test process that is killed asks nobody to stop: the kernel does it then
    with_us = [find_program("setpriv"), "--pdeathsig", "TERM", "--"]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            [*with_us, *command],
            env=system_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C is for us: we end the daemon in order.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(stop_timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(
    process: subprocess.Popen[bytes], sign: Callable[[], Sign | None], limit_s: float
) -> Sign | None:
    """A daemon's sign of life; None when it gives up or takes too long."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and time.monotonic() < deadline:
        if found := sign():
            return found
        time.sleep(0.02)
    return None


def last_words(log_file: Path) -> str:
    """Why a daemon gave up, from the end of its log."""
    return last_line(log_file.read_text(errors="replace"))


def last_line(text: str) -> str:
    """The line in which a program says what became of it."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
