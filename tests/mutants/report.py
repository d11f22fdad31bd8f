"""What a run says: progress as it goes, a table and the survivors when it is over."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core import log
from tests.mutants.accepted import Accepted
from tests.mutants.trials import Trial


@dataclass(frozen=True)
class PackageReport:
    """The trials of one package."""

    package: str
    seed: int
    trials: Sequence[Trial]
    stale: Sequence[Accepted]

    def count(self, *outcomes: str) -> int:
        return sum(trial.outcome in outcomes for trial in self.trials)

    @property
    def survivors(self) -> list[Trial]:
        return [t for t in self.trials if t.outcome in ("survived", "not entered")]

    @property
    def percent(self) -> float:
        """Of those that a test ought to find; a mutant that never ends is found."""
        judged = len(self.trials) - self.count("accepted")
        return 100 * self.count("killed", "timed out") / judged if judged else 100.0

    def row(self) -> list[str]:
        """A line of the closing table."""
        numbers = (
            len(self.trials),
            self.count("killed"),
            len(self.survivors),
            self.count("timed out"),
            self.count("accepted"),
        )
        return [self.package, *map(str, numbers), f"{self.percent:.0f} %"]

    def dump(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "package": self.package,
            "seed": self.seed,
            "percent": round(self.percent, 1),
            "outcomes": dict(Counter(t.outcome for t in self.trials)),
            "mutants": [_dump(trial) for trial in self.trials],
            "stale": [entry.model_dump() for entry in self.stale],
        }


def _dump(trial: Trial) -> dict[str, Any]:
    mutant = trial.mutant
    return {
        "file": mutant.file,
        "line": mutant.line,
        "function": mutant.function,
        "kind": mutant.kind,
        "before": mutant.before,
        "after": mutant.after,
        "outcome": trial.outcome,
        "tests": trial.tests,
        "killed_by": trial.killed_by,
        "seconds": round(trial.seconds, 1),
    }


def tell(reports: Sequence[PackageReport]) -> str:
    """Survivors, stale entries and the table."""
    lines: list[str] = []
    for report in reports:
        lines += [describe(trial) for trial in report.survivors]
        lines += [
            f"accepted.toml is stale: {entry.file} {entry.function}: {entry.before}"
            for entry in report.stale
        ]
    head = ["package", "sampled", "killed", "survived", "timed out", "accepted", "found"]
    return "\n".join([*lines, log.table(head, [report.row() for report in reports])])


def describe(trial: Trial) -> str:
    """One mutant in two lines."""
    mutant = trial.mutant
    where = f"{mutant.file}:{mutant.line} {mutant.function} ({mutant.kind}, {trial.tests} tests)"
    return f"{trial.outcome}: {where}\n  - {mutant.before}\n  + {mutant.after}"


class Progress:
    """Counts trials and says how long the rest will take."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._outcomes: Counter[str] = Counter()
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()

    def add(self, trial: Trial) -> None:
        """A trial has ended; safe from several threads."""
        with self._lock:
            self._outcomes[trial.outcome] += 1
            now = time.monotonic()
            on_terminal = sys.stderr.isatty()
            done = self._outcomes.total()
            if done < self._total and not on_terminal and now - self._last < 10:
                return
            self._last = now
            counts = ", ".join(f"{n} {outcome}" for outcome, n in self._outcomes.most_common())
            left = (now - self._start) / done * (self._total - done)
            line = f"{self._title}: {done}/{self._total}, {counts}"
            line += f", about {log.seconds(left)} left" if done < self._total else ""
            if not on_terminal:
                return log.say(line)
            end = "\n" if done == self._total else ""
            print(f"\r\x1b[2K{line}", end=end, file=sys.stderr, flush=True)
