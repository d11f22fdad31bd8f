"""Tests in several processes, which one process forks after it has collected all tests.

pytest-xdist starts its processes anew, so that each imports and collects everything again: ten
seconds of a core for each, and its threads and messages take as long again.
"""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import pytest
from _pytest.config import create_terminal_writer

# Where the folders of all processes lie, in a process that has one of its own.
SHARED_FOLDER = pytest.StashKey[Path]()
# How long a process may clean up after Ctrl-C, and how often it is looked at that says nothing.
_PATIENCE_S, _BEAT_S = 4.0, 1.0


def add_option(parser: pytest.Parser) -> None:
    """`-n`, as pytest-xdist has it."""
    options = parser.getgroup("processes", "several processes")
    words = "how many processes share the tests; 0: none but this one"
    options._addoption("-n", "--numprocesses", type=int, default=0, metavar="N", help=words)


@dataclass
class Worker:
    """A process that runs tests, and what it has still to run of its part."""

    pid: int
    pipe: Connection
    part: deque[int]
    last: int
    reason: str = ""
    status: int | None = None


@dataclass
class Supervisor:
    """Hands out parts, the first ones first, and reports what the processes report."""

    session: pytest.Session
    parts: deque[list[int]]
    workers: list[Worker] = field(default_factory=list)
    begun: int = 0

    def run(self, processes: int) -> None:
        """Until nothing is left, or until enough has failed."""
        session = self.session
        try:
            for _ in range(min(processes, len(self.parts))):
                self.fork(self.parts.popleft())
            while self.workers:
                ready = wait([worker.pipe for worker in self.workers], _BEAT_S)
                for worker in list(self.workers):
                    self.look_at(worker, is_ready=worker.pipe in ready)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
        finally:
            self.stop()

    def fork(self, part: list[int]) -> None:
        """A new process begins with this part."""
        ours, theirs = Pipe()
        self.begun += 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                # one that they held open would not end with its process
                for pipe in (ours, *(worker.pipe for worker in self.workers)):
                    pipe.close()
                _work(self.session, theirs, part, self.begun)
                code = 0
            finally:
                # what is to be done at the end is to be done by the first process, but for folders
                # that multiprocessing made in this one
                with suppress(BaseException):
                    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
                os._exit(code)
        theirs.close()
        self.workers.append(Worker(pid, ours, deque(part), part[-1]))

    def look_at(self, worker: Worker, *, is_ready: bool) -> None:
        """Hear what it says; another takes over where it has died."""
        if not is_ready and worker.status is None:
            # a process that it left behind can hold the pipe open
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            worker.status = status if pid else None
            return
        # what it said before its end is heard first
        if is_ready or worker.pipe.poll():
            with suppress(EOFError, OSError):
                return self.hear(worker, worker.pipe.recv())
        if worker.status is None:
            worker.status = os.waitpid(worker.pid, 0)[1]
        self.bury(worker)

    def hear(self, worker: Worker, message: list[tuple[str, Any]] | str | None) -> None:
        """Reports and warnings of a test, the reason of an end, or the wish for another part."""
        config = self.session.config
        if message is None:
            part = self.parts.popleft() if self.parts else []
            worker.part = deque(part)
            worker.last = part[-1] if part else worker.last
            worker.pipe.send(part)
        elif isinstance(message, str):
            worker.reason = message
        else:
            for kind, value in message:
                if kind == "report":
                    report = config.hook.pytest_report_from_serializable(config=config, data=value)
                    config.hook.pytest_runtest_logreport(report=report)
                else:
                    text, category, *place, when, nodeid, location = value
                    warning = warnings.WarningMessage(text, type(category, (Warning,), {}), *place)
                    config.hook.pytest_warning_recorded.call_historic(
                        kwargs={
                            "warning_message": warning,
                            "when": when,
                            "nodeid": nodeid,
                            "location": location,
                        }
                    )
            if worker.part:
                item = self.session.items[worker.part.popleft()]
                config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def bury(self, worker: Worker) -> None:
        """The test in which it died has failed; the rest of its part goes to a new process."""
        self.workers.remove(worker)
        worker.pipe.close()
        if not worker.part and not worker.status:
            return
        when: Literal["call", "teardown"] = "call" if worker.part else "teardown"
        item = self.session.items[worker.part.popleft() if worker.part else worker.last]
        code = os.waitstatus_to_exitcode(worker.status or 0)
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        reason = worker.reason or f"The process of this test ended: {ending}."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, when)
        hook = self.session.config.hook
        hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if worker.part:
            self.parts.appendleft(list(worker.part))
        if self.parts:
            self.fork(self.parts.popleft())

    def stop(self) -> None:
        """Ctrl-C, for all that still run; who does not listen is killed."""
        for worker in self.workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        end = time.monotonic() + _PATIENCE_S
        while self.workers and time.monotonic() < end:
            self.workers = [w for w in self.workers if not os.waitpid(w.pid, os.WNOHANG)[0]]
            time.sleep(0.02)
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)


def run_loop(session: pytest.Session, part_of: Callable[[str], str]) -> bool | None:
    """For the hook `pytest_runtestloop`; None: this process runs the tests itself."""
    option = session.config.option
    parts: dict[str, list[int]] = {}
    for place, item in enumerate(session.items):
        parts.setdefault(part_of(item.nodeid), []).append(place)
    # pytest itself says what could not be collected
    if option.numprocesses < 1 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    if reporter := session.config.pluginmanager.getplugin("terminalreporter"):
        reporter.showfspath = (
            False  # files come in turns: a line for each would be one for each test
        )
    # a folder that is made only after the fork would be another one for each process
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    Supervisor(session, deque(parts.values())).run(option.numprocesses)
    return True


def _work(session: pytest.Session, pipe: Connection, part: list[int], number: int) -> None:
    """Run part after part, and send what pytest says of each test."""
    config = session.config
    said: list[tuple[str, Any]] = []
    _begin(config, number, said)
    try:
        try:
            while part:
                items = [session.items[place] for place in part]
                for item, following in zip(items, [*items[1:], session], strict=True):
                    # which part comes next is not known yet: what belongs to the session stays
                    config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    pipe.send(said)
                    said.clear()
                    if session.shouldfail or session.shouldstop:
                        return
                pipe.send(None)
                part = pipe.recv()
        except KeyboardInterrupt:
            # another one must not stop what cleans up
            signal.signal(signal.SIGINT, lambda *_: None)
            raise
        finally:
            session._setupstate.teardown_exact(None)
    except BaseException:
        pipe.send(traceback.format_exc(limit=-4))
        raise


def _begin(config: pytest.Config, number: int, said: list[tuple[str, Any]]) -> None:
    """What a process of its own needs of its own."""
    manager = config.pluginmanager
    # processes that a test starts would import what the main module is
    sys.modules["__main__"] = ModuleType("__main__")
    capture = manager.getplugin("capturemanager")
    if capture and config.option.capture != "no":
        # the file into which output is caught would have one position for all
        capture.stop_global_capturing()
        # what a test prints uncaught would stand between the dots of all
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        capture.start_global_capturing()
        capture.suspend_global_capture()
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    config.stash[SHARED_FOLDER] = folders.getbasetemp()
    folders._basetemp = folders.getbasetemp() / f"process-{number}"
    folders._basetemp.mkdir(mode=0o700)
    # the first process prints; a plugin that dumps stacks at a timeout asks this one where to
    manager.unregister(name="terminalreporter")
    writer = create_terminal_writer(config, sys.stderr)
    manager.register(SimpleNamespace(_tw=writer), "terminalreporter")

    class Sender:
        """Keeps what is to be sent."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            said.append(("report", data))

        def pytest_warning_recorded(
            self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
        ) -> None:
            warning = warning_message
            names = (str(warning.message), warning.category.__name__)
            place = (warning.filename, warning.lineno)
            said.append(("warning", (*names, *place, when, nodeid, location)))

    manager.register(Sender())
    said.clear()  # pytest repeats what had been warned of before
