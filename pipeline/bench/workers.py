"""Worker processes: started, made ready, let go together, and heard until the last is done."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pipeline import errors, proc
from pipeline.bench.model import RequestRow
from pipeline.bench.plan import Job
from pipeline.errors import BenchNotMeasured, PipelineError

# Between the word to go and the first request, so that all workers have it.
_LEAD_S = 0.3
_QUEUED = 10_000
_STDERR_BYTES = 4000
Progress = Callable[[int, int, int], None]


def start_module(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A module of ours as a process to talk with."""
    # -P: a folder named `pipeline` where the user happens to be is not ours
    names = ("PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
    return proc.talk([sys.executable, "-P", "-m", module, *arguments], env=proc.environment(*names))


@dataclass(frozen=True)
class Effort:
    """What a worker took for its share."""

    cpu_s: float
    wall_s: float
    behind_s: float
    unsent: int

    @property
    def share(self) -> float:
        """Of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@dataclass
class Workers:
    """One process for each job; a `with` block that ends them all."""

    jobs: Sequence[Job]
    efforts: list[Effort] = field(default_factory=list)

    def __enter__(self) -> Workers:
        self._messages: queue.Queue[tuple[int, bytes]] = queue.Queue(_QUEUED)
        self._errors = [b"" for _ in self.jobs]
        self._done: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, job in enumerate(self.jobs):
                process = start_module("pipeline.bench.worker")
                self._processes.append(process)
                self._write(process, job.model_dump_json().encode())
                for target in (self._hear, self._hear_errors):
                    threading.Thread(target=target, args=(number, process), daemon=True).start()
        except BaseException:
            # no `with` block ends those that were started before the one that failed
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            proc.end(process)

    @staticmethod
    def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # it ended: its last message says why

    def _hear(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                self._messages.put((number, line))
        except ValueError:
            return  # closed by us
        self._messages.put((number, b""))

    def _hear_errors(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                self._errors[number] = (self._errors[number] + line)[-_STDERR_BYTES:]
        except ValueError:
            return

    def _next(self) -> tuple[int, Any]:
        number, line = self._messages.get()
        # one that is done may be gone before the others are
        while not line and number in self._done:
            number, line = self._messages.get()
        if not line:
            text = self._errors[number].decode(errors="replace")
            raise BenchNotMeasured(f"a worker of the client ended: {proc.last_line(text)}")
        message = json.loads(line)
        if "error" in message:
            raise _again(*message["error"])
        return number, message

    def rows(self, progress: Progress | None = None) -> Iterator[RequestRow]:
        """Let all of them go, and hand on each request once its worker is done."""
        waiting = len(self.jobs)
        while waiting:
            waiting -= "ready" in self._next()[1]
        start = json.dumps({"start_at": time.monotonic() + _LEAD_S}).encode()
        for process in self._processes:
            self._write(process, start)
        seen = [(0, 0, 0)] * len(self.jobs)
        while len(self.efforts) < len(self.jobs):
            number, message = self._next()
            if "row" in message:
                yield RequestRow.model_validate(message["row"])
            elif "end" in message:
                self._done.add(number)
                self.efforts.append(Effort(**message["end"]))
            elif "progress" in message and progress:
                seen[number] = tuple(message["progress"])
                progress(*(sum(each) for each in zip(*seen, strict=True)))


def _again(name: str, message: str, hint: str) -> PipelineError:
    """An error of a worker, as ours."""
    kind = getattr(errors, name, BenchNotMeasured)
    error: PipelineError = kind(message, hint)
    return error
