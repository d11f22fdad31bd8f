"""What a process of a test writes down: the step it begins, and what came out of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Job = dict[str, Any]


class Voice:
    """The answers file: a line when a step begins, another when it has ended."""

    def __init__(self, path: Path, job: Job) -> None:
        self._path, self._fault = path, job.get("fault") or {}
        self._mine = self._fault.get("rank") == job["rank"]

    def step(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        self._say({"begin": name})
        self._break(name)
        self._say({"end": name, **work()})

    def faulty(self, kind: str) -> bool:
        """Whether this rank was told to misbehave so: the check's own test."""
        return self._mine and self._fault.get("kind") == kind

    def _break(self, name: str) -> None:
        if not name.startswith(self._fault.get("step", "values")):
            return
        if self.faulty("hang"):
            time.sleep(86400)
        if self.faulty("die"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _say(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
