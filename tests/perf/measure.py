"""How a step is measured: wall clock, CPU of the process tree, CPU of the machine, memory."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


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
    peak = _watch(child)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(args)}: exit {child.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu, machine_cpu_s() - machine, peak)


def _watch(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end; return the largest memory (PSS) the process tree had on the way."""
    peak = 0
    while True:
        try:
            child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            peak = max(peak, sum(_pss(pid) for pid in _tree(child.pid)))
        else:
            return peak


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(p) for p in task.read_text(encoding="ascii").split()]
            except OSError:
                continue
    return found


def _pss(pid: int) -> int:
    """A process's share of memory: pages it shares with its siblings count once in the sum."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    line = next((row for row in text.splitlines() if row.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024
