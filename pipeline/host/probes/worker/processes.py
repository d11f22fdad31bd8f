"""Processes that work on one test together, watched from outside: hung, dead or finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LOOK_EVERY_S = 0.05
# Ranks that wait for a dead one get this long to notice it themselves.
_GRACE_S = 3.0
_WORDS = 2000


@dataclass(frozen=True)
class Limits:
    """How long a process may stay silent: until its first step, and in each step after it."""

    start_s: float = 120.0
    step_s: float = 60.0


@dataclass
class RankEnd:
    """How one process ended, and what it said on the way."""

    rank: int
    ended: str  # finished, hung, died, or stopped because of another
    at: str  # the step it had begun and not ended
    code: int | None
    steps: dict[str, dict[str, Any]]
    words: str


@dataclass
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    answers: Path
    output: Path
    ended: str = ""
    lines: int = 0
    spoke: float = field(default_factory=time.monotonic)


def run_processes(
    jobs: list[dict[str, Any]], limits: Limits, settings: dict[str, str] | None = None
) -> list[RankEnd]:
    """Start a process a job and wait until each has ended, one way or another."""
    with tempfile.TemporaryDirectory(prefix="probe-") as name:
        members: list[_Member] = []
        try:
            for rank, job in enumerate(jobs):
                members.append(_started(Path(name), rank, job, settings or {}))
            _watch(members, limits)
        finally:
            for member in members:
                _kill(member)
        return [_end(member) for member in members]


def _started(folder: Path, rank: int, job: dict[str, Any], settings: dict[str, str]) -> _Member:
    paths = {x: folder / f"{rank}.{x}" for x in ("job", "answers", "output")}
    whole = {**job, "rank": rank, "rendezvous": str(folder / "rendezvous")}
    paths["job"].write_text(json.dumps(whole), encoding="utf-8")
    paths["answers"].touch()
    # ranks of one machine meet over loopback, whatever its other networks are
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", **os.environ, **settings}
    with paths["output"].open("wb") as words:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent), "--rank", *map(str, _in(paths))],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Member(rank, process, paths["answers"], paths["output"])


def _in(paths: dict[str, Path]) -> tuple[Path, Path]:
    return paths["job"], paths["answers"]


def _watch(members: list[_Member], limits: Limits) -> None:
    """Until all have ended; the first that hangs or dies ends the others."""
    first_loss: float | None = None
    while True:
        alive = [m for m in members if not m.ended]
        for member in alive:
            _look(member, limits)
        if not any(not m.ended for m in members):
            return
        lost = [m for m in members if m.ended in ("hung", "died")]
        if lost and first_loss is None:
            first_loss = time.monotonic()
        if first_loss is not None and time.monotonic() - first_loss > _GRACE_S:
            for member in members:
                member.ended = member.ended or "stopped"
            return
        time.sleep(_LOOK_EVERY_S)


def _look(member: _Member, limits: Limits) -> None:
    code = member.process.poll()
    if code is not None:
        member.ended = "finished" if code == 0 else "died"
        return
    lines = member.answers.read_bytes().count(b"\n")
    now = time.monotonic()
    if lines != member.lines:
        member.lines, member.spoke = lines, now
    if now - member.spoke > (limits.step_s if member.lines else limits.start_s):
        member.ended = "hung"


def _kill(member: _Member) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(member.process.pid, signal.SIGKILL)
    # a process stuck in the driver cannot be ended by anyone; it must not hang us too
    with suppress(subprocess.TimeoutExpired):
        member.process.wait(timeout=10)


def _end(member: _Member) -> RankEnd:
    steps: dict[str, dict[str, Any]] = {}
    at = "start"
    for line in member.answers.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the last line of a killed process may be cut
            said = json.loads(line)
            if "begin" in said:
                at = said["begin"]
            else:
                steps[said.pop("end")] = said
                at = ""
    words = member.output.read_text(encoding="utf-8", errors="replace")[-_WORDS:]
    return RankEnd(member.rank, member.ended, at, member.process.returncode, steps, words)
