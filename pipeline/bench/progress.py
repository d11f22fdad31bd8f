"""How far a sweep is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pipeline import log
from pipeline.bench.model import Cell, Metrics
from pipeline.bench.workers import Progress


class SweepProgress:
    """Lines for people; the time left is guessed from the cells that were done."""

    def __init__(self, cells: Sequence[Cell], repeats: int) -> None:
        self._left = {cell.name: repeats for cell in cells}
        self._cells, self._repeats = {cell.name: cell for cell in cells}, repeats
        self._seconds: dict[str, float] = {}  # for each request of a cell

    def skip(self, cell: Cell, trials: int) -> None:
        """Trials that are done already, or will not be done."""
        self._left[cell.name] = max(0, self._left[cell.name] - trials)

    @contextmanager
    def trial(self, cell: Cell, number: int) -> Iterator[Progress]:
        """Say what begins; then a line now and then."""
        title = f"{cell.name}: trial {number + 1} of {self._repeats}"
        log.say(f"{title}, {log.count(cell.requests, 'request')}{self._time_left()}")
        start = last = time.monotonic()

        def advance(done: int, failed: int, events: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < log.QUIET_LINE_EVERY_S:
                return
            last = now
            wrong = f", {failed} failed" if failed else ""
            rate = events / (now - start)
            log.say(f"  {title}: {done} of {cell.requests} done{wrong}, {rate:,.0f} events/s")

        yield advance
        self.skip(cell, 1)

    def ended(self, cell: Cell, metrics: Metrics, void: Sequence[str]) -> None:
        """What came out, in one line."""
        self._seconds[cell.name] = metrics.duration_s / max(1, metrics.requests)
        if void:
            # what is left of such a trial is better than the truth
            return log.say(f"  void: {void[0]}")
        ttft = f", TTFT {metrics.ttft_ms.mean:,.0f} ms" if metrics.ttft_ms else ""
        tpot = f", TPOT {metrics.tpot_ms.mean:,.1f} ms" if metrics.tpot_ms else ""
        log.say(
            f"  {metrics.output_tok_s:,.1f} output tok/s{ttft}{tpot}"
            f" in {log.seconds(metrics.duration_s)}"
        )

    def _time_left(self) -> str:
        if not self._seconds:
            return ""
        latest = list(self._seconds.values())[-1]
        left = sum(
            count * self._cells[name].requests * self._seconds.get(name, latest)
            for name, count in self._left.items()
        )
        return f"; about {log.seconds(left)} left"
