"""The one place that starts programs: argument lists, a named environment, a line to replay."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from pipeline.core.errors import MissingTool

# What children may see by default: enough to find programs, homes and networks.
_PASSED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
# How long a killed process may take to go.
_GRACE_S = 5.0
# held, so that Python does not complain about a child that was not waited for
_GIVEN_UP: list[subprocess.Popen[bytes]] = []
# what threads of ours wait for in `read`
_READ: set[subprocess.Popen[bytes]] = set()


def child_environment(*extra_names: str, **values: str) -> dict[str, str]:
    """A short explicit environment: the common names, those asked for, and set values."""
    # a token in the environment reaches only the child that it is named for
    env = {n: os.environ[n] for n in (*_PASSED, *extra_names) if n in os.environ}
    env.update(values)
    return env


def last_line(output: str, otherwise: str = "no output") -> str:
    """The last line of an output, where programs say why they failed."""
    lines = (line.strip() for line in reversed(output.splitlines()))
    # below an error Docker adds a pointer to its help
    return next((x for x in lines if x and not re.match("(See|Run) 'docker ", x)), otherwise)


def find_tool(name: str, hint: str) -> str:
    """The program's path, or an error with how to get it."""
    path = shutil.which(name)
    if path is None:
        raise MissingTool(f"`{name}` is not installed", hint)
    return path


@contextmanager
def undisturbed() -> Iterator[None]:
    """Postpones signals to its end: one amid a start would leave a child that nobody knows of."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    # children ignore what we ignore
    before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        if caught:
            # a second signal means the same as the first
            signal.raise_signal(caught[0])


def read(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs to the end and returns its output; the caller judges the exit code."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with undisturbed():
            process = subprocess.Popen(
                list(args),
                env=dict(env or child_environment()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            _READ.add(process)
        out, err = process.communicate(stdin, timeout=timeout_s)
    except BaseException:
        if process is not None:
            # a program that runs under another user's rights cannot be killed by us
            with suppress(OSError):
                process.kill()
            _let_go(process)
        raise
    finally:
        if process is not None:
            _READ.discard(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def end_reads() -> None:
    """Ends the programs of `read` in all threads: Ctrl-C reaches the main one alone."""
    for process in list(_READ):
        with suppress(OSError):
            process.kill()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a program that has a group of its own, and its children."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    _let_go(process)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Waits a moment for a killed process, then gives it up.

    Inside a driver that hangs, a process ignores even SIGKILL: waiting for it has no end.
    """
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        _GIVEN_UP.append(process)
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


@contextmanager
def running(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    output: Path | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program beside us, its output in a file or a pipe; it ends with the block.

    So do its children.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with (
            output.open("wb") if output else nullcontext(subprocess.PIPE) as file,
            undisturbed(),
        ):
            process = subprocess.Popen(
                list(args),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # a group of its own, so that what it starts ends with it
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            _end_group(process)


def talk(
    args: Sequence[str], *, env: Mapping[str, str], errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a program to write to and read from; the caller ends it with `end`.

    `errors` is a file for what nobody reads while it runs: a pipe would fill up and stop it.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with undisturbed():
            process = subprocess.Popen(
                list(args),
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors or subprocess.PIPE,
                start_new_session=True,
            )
    except BaseException:
        if process is not None:
            _end_group(process)
        raise
    return process


def send_line(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Sends one line to a program of `talk` at once; OSError if the program has ended."""
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def end(process: subprocess.Popen[bytes]) -> None:
    """Closes its pipes, and ends it and its children if it does not go by itself."""
    _close(process)
    try:
        # most programs end by themselves once their stdin is closed
        process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        _end_group(process)
