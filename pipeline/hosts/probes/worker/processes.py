"""The ranks of one test, each a process, watched from outside: finished, hung or dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_POLL_S = 0.05
# Ranks that wait for a dead one get this long to notice it themselves.
_GRACE_S = 3.0
# characters: the end of a traceback, not all of NCCL's log
_KEPT_OUTPUT = 2000


Job = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How long a process may stay silent: until its first step, and in each step after it."""

    start_s: float = 120.0
    step_s: float = 60.0


@dataclass
class RankResult:
    """How one rank ended, the results of its steps, and the end of its output."""

    rank: int
    outcome: str  # finished, hung, died, or stopped because of another
    step: str  # the one it was in
    code: int | None
    steps: dict[str, dict[str, Any]]
    output: str


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    output: Path
    outcome: str = ""
    lines: int = 0
    last_line_at: float = field(default_factory=time.monotonic)


def run_processes(jobs: list[Job], limits: Limits) -> list[RankResult]:
    """Start a process for each job and wait until each has finished, died or been stopped."""
    with tempfile.TemporaryDirectory(prefix="probe-") as name:
        ranks: list[_Rank] = []
        try:
            for number, job in enumerate(jobs):
                job_file, log, output = (Path(name, f"{number}.{x}") for x in ("job", "log", "out"))
                whole = {**job, "rank": number, "rendezvous": str(Path(name, "rendezvous"))}
                job_file.write_text(json.dumps(whole), encoding="utf-8")
                log.touch()
                with output.open("wb") as out:
                    process = subprocess.Popen(
                        [sys.executable, Path(__file__).parent, "--rank", job_file, log],
                        # ranks of one machine meet over loopback, whatever its other networks are
                        env={"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", **os.environ},
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                ranks.append(_Rank(number, process, log, output))
            _watch(ranks, limits)
        finally:
            for rank in ranks:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                # one that is stuck in the driver ignores even SIGKILL; waiting would hang us too
                with suppress(subprocess.TimeoutExpired):
                    rank.process.wait(timeout=10)
        return [_result(rank) for rank in ranks]


def _watch(ranks: list[_Rank], limits: Limits) -> None:
    """Until all have ended; the first that hangs or dies ends the others."""
    first_loss: float | None = None
    while True:
        now = time.monotonic()
        for rank in (rank for rank in ranks if not rank.outcome):
            if (code := rank.process.poll()) is not None:
                rank.outcome = "finished" if code == 0 else "died"
                continue
            lines = rank.log.read_bytes().count(b"\n")
            if lines != rank.lines:
                rank.lines, rank.last_line_at = lines, now
            if now - rank.last_line_at > (limits.step_s if rank.lines else limits.start_s):
                rank.outcome = "hung"
        if all(rank.outcome for rank in ranks):
            return
        if first_loss is None and any(r.outcome in ("hung", "died") for r in ranks):
            first_loss = now
        if first_loss is not None and now - first_loss > _GRACE_S:
            for rank in ranks:
                rank.outcome = rank.outcome or "stopped"
            return
        time.sleep(_POLL_S)


def _result(rank: _Rank) -> RankResult:
    steps: dict[str, dict[str, Any]] = {}
    step = "start"
    for line in rank.log.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a killed process may be cut
            entry = json.loads(line)
            if "begin" in entry:
                step = entry["begin"]
            else:
                steps[entry.pop("end")] = entry
                step = ""
    output = rank.output.read_text(encoding="utf-8", errors="replace")[-_KEPT_OUTPUT:]
    return RankResult(rank.number, rank.outcome, step, rank.process.returncode, steps, output)


class StepLog:
    """A line when a step begins and another when it ends: a hang is in the step that did not end.

    A fault (`--fault`) makes one rank misbehave on purpose, so that the tests can be tested.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self._path, self._fault = path, job.get("fault") or {}
        self._mine = self._fault.get("rank") == job["rank"]

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """The block puts the step's results into the dict that it gets."""
        results: dict[str, Any] = {}
        self._write({"begin": name})
        if name.startswith(self._fault.get("step", "values")):
            if self.faulty("hang"):
                time.sleep(86400)
            if self.faulty("die"):
                # as the kernel ends a process: no exception, no clean-up
                os.kill(os.getpid(), signal.SIGKILL)
        yield results
        self._write({"end": name, **results})

    def faulty(self, kind: str) -> bool:
        """Whether this rank has to have this fault."""
        return self._mine and self._fault.get("kind") == kind

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
