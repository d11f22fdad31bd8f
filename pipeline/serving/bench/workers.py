"""Worker processes: started, made ready, let go together, and heard until the last is done."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pipeline.core import errors, log, proc
from pipeline.core.errors import BenchNotMeasured, PipelineError
from pipeline.serving.bench.model import Cell, Metrics, RequestRow
from pipeline.serving.bench.plan import WorkerJob

# Between the word to go and the first request, so that all workers have it.
_LEAD_S = 0.3
_QUEUED = 10_000
_STDERR_BYTES = 4000
Progress = Callable[[int, int, int], None]


def start_module(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a module of ours as a process to talk with."""
    # -P: a folder named `pipeline` where the user happens to be is not ours
    names = ("PYTHONPATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
    return proc.talk(
        [sys.executable, "-P", "-m", module, *arguments], env=proc.child_environment(*names)
    )


@dataclass(frozen=True)
class WorkerStats:
    """What a worker took for its share."""

    cpu_s: float
    wall_s: float
    behind_s: float
    unsent: int

    @property
    def share(self) -> float:
        """The share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


@dataclass
class Workers:
    """One process for each job; a `with` block that ends them all."""

    jobs: Sequence[WorkerJob]
    efforts: list[WorkerStats] = field(default_factory=list)

    def __enter__(self) -> Workers:
        self._messages: queue.Queue[tuple[int, bytes]] = queue.Queue(_QUEUED)
        self._errors = [b"" for _ in self.jobs]
        self._done: set[int] = set()
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number, job in enumerate(self.jobs):
                process = start_module("pipeline.serving.bench.worker")
                self._processes.append(process)
                # one that ended wrote why as its last message
                with suppress(OSError):
                    proc.send_line(process, job.model_dump_json().encode())
                for of in ((number, process, False), (number, process, True)):
                    threading.Thread(target=self._hear, args=of, daemon=True).start()
        except BaseException:
            # no `with` block ends those that were started before the one that failed
            self.__exit__()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        for process in self._processes:
            proc.end(process)

    def _hear(self, number: int, process: subprocess.Popen[bytes], is_error: bool) -> None:
        pipe = process.stderr if is_error else process.stdout
        assert pipe is not None
        # ValueError: `__exit__` has closed the pipe
        with suppress(ValueError):
            for line in pipe:
                if is_error:
                    self._errors[number] = (self._errors[number] + line)[-_STDERR_BYTES:]
                else:
                    self._messages.put((number, line))
            if not is_error:
                self._messages.put((number, b""))

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
            name, text, hint = message["error"]
            error: PipelineError = getattr(errors, name, BenchNotMeasured)(text, hint)
            raise error
        return number, message

    def rows(self, progress: Progress | None = None) -> Iterator[RequestRow]:
        """Let all of them go, and hand on each request once its worker is done."""
        waiting = len(self.jobs)
        while waiting:
            waiting -= "ready" in self._next()[1]
        start = json.dumps({"start_at": time.monotonic() + _LEAD_S}).encode()
        for process in self._processes:
            with suppress(OSError):
                proc.send_line(process, start)
        seen = [(0, 0, 0)] * len(self.jobs)
        while len(self.efforts) < len(self.jobs):
            number, message = self._next()
            if "row" in message:
                yield RequestRow.model_validate(message["row"])
            elif "end" in message:
                self._done.add(number)
                self.efforts.append(WorkerStats(**message["end"]))
            elif "progress" in message and progress:
                seen[number] = tuple(message["progress"])
                progress(*(sum(each) for each in zip(*seen, strict=True)))


class SweepProgress:
    """Lines for people; the time left is guessed from the cells that were done."""

    def __init__(self, cells: Sequence[Cell], repeats: int) -> None:
        self._left = {cell.name: repeats for cell in cells}
        self._cells, self._repeats = {cell.name: cell for cell in cells}, repeats
        self._seconds: dict[str, float] = {}  # for each request of a cell

    def skip(self, cell: Cell, trials: int) -> None:
        """Leaves out trials that are already done, or will not be done."""
        self._left[cell.name] = max(0, self._left[cell.name] - trials)

    @contextmanager
    def trial(self, cell: Cell, number: int) -> Iterator[Progress]:
        """Name the trial that begins, and guess the time of the rest; then a line now and then."""
        title, left = f"{cell.name}: trial {number + 1} of {self._repeats}", ""
        if self._seconds:
            latest = list(self._seconds.values())[-1]
            seconds = sum(
                count * self._cells[name].requests * self._seconds.get(name, latest)
                for name, count in self._left.items()
            )
            left = f"; about {log.seconds(seconds)} left"
        log.say(f"{title}, {log.count(cell.requests, 'request')}{left}")
        start = last = time.monotonic()

        def advance(done: int, failed: int, events: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < log.QUIET_LINE_EVERY_S:
                return
            last = now
            wrong = f", {failed} failed" if failed else ""
            rate = events / (now - start)
            # beside reads, how many there will be is not known
            of = "" if cell.reads else f" of {cell.requests}"
            log.say(f"  {title}: {done}{of} done{wrong}, {rate:,.0f} events/s")

        yield advance
        self.skip(cell, 1)

    def ended(self, cell: Cell, metrics: Metrics, void: Sequence[str]) -> None:
        """Prints one line about the trial."""
        self._seconds[cell.name] = metrics.duration_s / max(1, metrics.requests)
        if void:
            # the numbers of such a trial are better than the truth
            return log.say(f"  void: {void[0]}")
        ttft = f", TTFT {metrics.ttft_ms.mean:,.0f} ms" if metrics.ttft_ms else ""
        tpot = f", TPOT {metrics.tpot_ms.mean:,.1f} ms" if metrics.tpot_ms else ""
        took = log.seconds(metrics.duration_s)
        log.say(f"  {metrics.output_tok_s:,.1f} output tok/s{ttft}{tpot} in {took}")
