"""How a step is measured: wall clock, CPU of its own processes, memory; side by side, in turns."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.files import cores

TURNS = 3


@dataclass(frozen=True)
class Cost:
    """What a step took; a daemon that worked for it is counted apart."""

    wall_s: float
    cpu_s: float
    daemon_cpu_s: float = 0.0
    peak_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.wall_s + other.wall_s,
            self.cpu_s + other.cpu_s,
            self.daemon_cpu_s + other.daemon_cpu_s,
            max(self.peak_bytes, other.peak_bytes),
        )

    @property
    def all_cpu_s(self) -> float:
        return self.cpu_s + self.daemon_cpu_s


def in_turns(turns: int, *sides: Callable[[], Cost]) -> list[list[Cost]]:
    """The costs of each side; every turn begins with another one, so that none is always first."""
    found: list[list[Cost]] = [[] for _ in sides]
    for turn in range(turns):
        for step in range(len(sides)):
            which = (turn + step) % len(sides)
            found[which].append(sides[which]())
    return found


class Report:
    """Comparisons, then plain facts: Markdown, to be pasted into the docs as it is."""

    def __init__(self) -> None:
        self._rows: list[list[str]] = []
        self._lost: list[str] = []
        self._facts: list[str] = []
        self._load = os.getloadavg()[0]

    def compare(
        self, what: str, ours: Sequence[Cost], other: str, theirs: Sequence[Cost], more: str = ""
    ) -> None:
        """Medians of the turns with their spread; a ratio below one is in our favour."""
        ratios = {
            "wall": [o.wall_s / t.wall_s for o, t in zip(ours, theirs, strict=True)],
            "CPU": [o.all_cpu_s / t.all_cpu_s for o, t in zip(ours, theirs, strict=True)],
        }
        for name, values in ratios.items():
            if (middle := statistics.median(values)) > 1:
                always = "in every turn" if min(values) > 1 else "not in every turn"
                self._lost.append(
                    f"{what}, against {other}: {middle:.2f}× its {name} time ({always})"
                )
        cells = [spread(values, "×", 2) for values in ratios.values()]
        self._add([what + more, str(len(ours)), *_times(ours), other, *_times(theirs), *cells])

    def alone(self, what: str, ours: Sequence[Cost], more: str = "") -> None:
        """A step that nobody else is measured beside."""
        self._add([what + more, str(len(ours)), *_times(ours), *["-"] * 5])

    def fact(self, what: str, value: str) -> None:
        """What is no time: memory, bytes, an error, a reason why something is not measured."""
        self._facts.append(f"{what}: {value}")
        print(self._facts[-1], file=sys.stderr, flush=True)

    def _add(self, row: list[str]) -> None:
        self._rows.append(row)
        print(" | ".join(row), file=sys.stderr, flush=True)

    def __str__(self) -> str:
        """Everything, and where we lose."""
        lines = [
            f"{cores()} cores, {os.uname().machine}; load of the machine"
            f" {self._load:.1f} before and {os.getloadavg()[0]:.1f} after. Medians, with the least"
            " and the most of the turns; ratios are ours to theirs, turn by turn.",
            "",
        ]
        if self._rows:
            head = ["what", "turns", "our wall", "our CPU", "beside", "its wall", "its CPU"]
            lines += [_cells([*head, "wall ratio", "CPU ratio"]), _cells(["---"] * 9)]
            lines += [_cells(row) for row in self._rows]
            lines += ["", "Where we lose:" if self._lost else "No row has a median ratio above 1."]
            lines += [f"- {line}" for line in self._lost]
        return "\n".join([*lines, "", *(f"- {line}" for line in self._facts)]).rstrip()


def _cells(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def _times(costs: Sequence[Cost]) -> list[str]:
    own = spread([cost.cpu_s for cost in costs], " s")
    if any(cost.daemon_cpu_s for cost in costs):
        own = f"{own}, daemon {spread([cost.daemon_cpu_s for cost in costs], ' s')}"
    return [spread([cost.wall_s for cost in costs], " s"), own]


def spread(values: Sequence[float], unit: str = "", digits: int | None = None) -> str:
    """The median, then the least and the most."""
    middle, least, most = statistics.median(values), min(values), max(values)
    places = digits if digits is not None else (1 if middle >= 10 else 2)
    text = f"{middle:.{places}f}{unit}"
    return text if len(values) == 1 else f"{text} ({least:.{places}f}–{most:.{places}f})"


def as_users_run() -> dict[str, str]:
    """What is added to the environment: compiled modules are kept, as on a user's machine."""
    cache = f"{tempfile.gettempdir()}/sm120-perf-pycache"
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}


def run(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    out: Path | None = None,
) -> Cost:
    """Run a command and measure it with its children; its failure is ours."""
    with (out or Path(os.devnull)).open("wb") as stdout:
        before, start = _children_cpu_s(), time.monotonic()
        own = {**os.environ, **as_users_run(), **(env or {})}
        child = subprocess.Popen(list(args), env=own, cwd=cwd, stdout=stdout)
        try:
            peak, seen_cpu = _watch(child)
        except BaseException:
            # what goes on would write to folders that are being removed
            child.terminate()
            child.wait()
            raise
    wall, cpu = time.monotonic() - start, _children_cpu_s() - before
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(args)}: exit {child.returncode}")
    # workers of a fork server are nobody's waited-for children: they count as they were seen
    return Cost(wall, max(cpu, seen_cpu), peak_bytes=peak)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def measured() -> Iterator[list[Cost]]:
    """A block of our own process and the children it waits for; the list has its cost after."""
    costs: list[Cost] = []
    before, start = time.process_time() + _children_cpu_s(), time.monotonic()
    yield costs
    cpu = time.process_time() + _children_cpu_s() - before
    costs.append(Cost(time.monotonic() - start, cpu))


def _watch(child: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for the end; the most memory (PSS) and the CPU time its processes were seen with."""
    peak = 0
    cpu: dict[int, float] = {}
    while True:
        try:
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            tree = _tree(child.pid)
            peak = max(peak, sum(_pss(pid) for pid in tree))
            cpu |= {pid: max(_cpu_s(pid), cpu.get(pid, 0.0)) for pid in tree}
        else:
            return peak, sum(cpu.values())


def tree_cpu_s(pid: int) -> float:
    """CPU seconds of a running process, its children, and those that ended before."""
    return sum(_cpu_s(p) + _ended_cpu_s(p) for p in _tree(pid))


def _ended_cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(p) for p in task.read_text(encoding="ascii").split()]
            except OSError:
                continue
    return found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss(pid: int) -> int:
    """A process's share of memory: pages it shares with its siblings count once in the sum."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    line = next((row for row in text.splitlines() if row.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024
