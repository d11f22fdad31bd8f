"""The log of one process: the step it begins, then the result of that step, a JSON line each."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


class StepLog:
    """A line when a step begins and another when it ends: a hang is in the step that did not end.

    A fault (`--fault`) makes one rank misbehave on purpose, so that the tests can be tested.
    """

    def __init__(self, path: Path, job: Job) -> None:
        self._path, self._fault = path, job.get("fault") or {}
        self._mine = self._fault.get("rank") == job["rank"]

    def step(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        self._write({"begin": name})
        self._misbehave(name)
        self._write({"end": name, **work()})

    def faulty(self, kind: str) -> bool:
        """Whether this rank has to misbehave in this way."""
        return self._mine and self._fault.get("kind") == kind

    def _misbehave(self, name: str) -> None:
        if not name.startswith(self._fault.get("step", "values")):
            return
        if self.faulty("hang"):
            time.sleep(86400)
        if self.faulty("die"):
            # as the kernel ends a process: no exception, no clean-up
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
