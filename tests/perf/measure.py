"""How a step is measured: wall clock, CPU of the process tree, CPU of the machine, memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import log


class Report:
    """Rows of claim, ours, theirs, ratio; printed as they come."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def add(self, claim: str, ours: str, other: str = "-", ratio: str = "-") -> None:
        self.rows.append([claim, ours, other, ratio])
        print(f"{claim}: {ours} | {other} | {ratio}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return log.table(["what", "ours", "the usual way", "ratio"], self.rows)


@dataclass(frozen=True)
class Cost:
    """What a step took."""

    wall_s: float
    cpu_s: float
    machine_cpu_s: float
    peak_bytes: int = 0


def machine_cpu_s() -> float:
    """Busy CPU seconds of the whole machine since it started; daemons count, so do neighbours."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n")[0].split()[1:]
    busy = [int(f) for i, f in enumerate(fields[:8]) if i not in (3, 4)]
    return sum(busy) / os.sysconf("SC_CLK_TCK")


def run(
    args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Cost:
    """Run a command and measure it with its children; its failure is ours."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    machine, start = machine_cpu_s(), time.monotonic()
    child = subprocess.Popen(
        list(args), env={**os.environ, **(env or {})}, cwd=cwd, stdout=subprocess.DEVNULL
    )
    try:
        peak, seen_cpu = _watch(child)
    except BaseException:
        # what goes on would write to folders that are being removed
        child.terminate()
        child.wait()
        raise
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(args)}: exit {child.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    # workers of a fork server are nobody's waited-for children: they count as they were seen
    return Cost(wall, max(cpu, seen_cpu), machine_cpu_s() - machine, peak)


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
