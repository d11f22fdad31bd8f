"""NCCL settings by measurement: try each under a time limit, keep the best per workload."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Annotated, Literal

from pipeline.core.model import FILE_VERSION, Frozen
from pipeline.hosts.probes.runner import ProbeReport

# Below this a gain is noise, and a host without settings is easier to explain.
_GAIN = 0.03
# What people of SM120 machines report to matter (local-inference-lab/rtx6kpro, nccl-tuning.md).
# Never LL128: where it is named, NCCL takes it across sockets too, where CPUs split its 128-byte
# stores and old data is read without an error (NVIDIA/nccl#2036). A short sweep would not notice.
_PROTOCOLS = ("", "LL", "LL,Simple", "Simple")
_LEVELS = ("", "PHB", "NODE", "SYS", "off")
_CHANNELS = ("", "8", "16")


class ReduceWorkload(Frozen):
    """What engines reduce: a row of hidden values for each sequence that is decoded at once."""

    name: Literal["latency", "throughput"]
    concurrency: int
    sizes_kib: list[int]


class Setting(Frozen):
    """Environment variables to try; without any, NCCL chooses."""

    variables: dict[str, str]

    @property
    def label(self) -> str:
        return " ".join(f"{k}={v}" for k, v in sorted(self.variables.items())) or "NCCL's choice"


class Tried(Frozen):
    """The result of one setting: microseconds by size, or why it is refused."""

    setting: Setting
    refused: str
    us_by_kib: dict[int, float]


class Winner(Frozen):
    """The best setting of a workload, beside the numbers of NCCL's own choice."""

    workload: ReduceWorkload
    setting: Setting
    us: float
    us_untuned: float | None
    gain: float | None

    @property
    def conf(self) -> str:
        """The lines for /etc/nccl.conf."""
        lines = [f"{k}={v}\n" for k, v in sorted(self.setting.variables.items())]
        return f"# {self.workload.name}, measured: {self.us:.1f} µs\n" + "".join(lines)


class Tuning(Frozen):
    """A sweep: what was tried, and what won."""

    version: Annotated[Literal[1], FILE_VERSION] = 1
    ranks: int
    device: str
    tried: list[Tried]
    winners: list[Winner]


Runner = Callable[[Setting, list[int]], ProbeReport]


def workloads(hidden: int, low: int, high: int) -> list[ReduceWorkload]:
    """Two concurrencies; a token's row is `hidden` values of two bytes."""

    def sizes(concurrency: int) -> list[int]:
        kib = hidden * 2 * concurrency / 1024
        return sorted({max(1, round(kib)), max(1, round(2 * kib))})

    return [
        ReduceWorkload(name="latency", concurrency=low, sizes_kib=sizes(low)),
        ReduceWorkload(name="throughput", concurrency=high, sizes_kib=sizes(high)),
    ]


def plan(*, full: bool = False, graph_file: str | None = None) -> list[Setting]:
    """The settings to try, NCCL's own choice first: one factor at a time, or all combinations."""
    choices = list(product(_PROTOCOLS, _LEVELS, _CHANNELS))
    if not full:
        # two factors together only where people report that they belong together
        pairs = {("LL,Simple", "SYS", ""), ("LL", "SYS", ""), ("", "off", "16")}
        choices = [c for c in choices if sum(map(bool, c)) <= 1 or c in pairs]
    settings = []
    for protocol, level, channels in choices:
        p2p = {"NCCL_P2P_DISABLE": "1"} if level == "off" else {"NCCL_P2P_LEVEL": level}
        given = {"NCCL_PROTO": protocol, **p2p, "NCCL_MIN_NCHANNELS": channels}
        settings.append(Setting(variables={name: value for name, value in given.items() if value}))
    if graph_file:
        settings.append(Setting(variables={"NCCL_GRAPH_FILE": graph_file}))
    return settings


def sweep(
    settings: list[Setting], loads: list[ReduceWorkload], run: Runner, *, ranks: int, device: str
) -> Tuning:
    """Try all settings; refuse one that hangs, dies, gives wrong sums or no numbers."""
    sizes = sorted({s for load in loads for s in load.sizes_kib})
    tried: list[Tried] = []
    for setting in settings:
        rows = run(setting, sizes).rows
        reduced = [r for r in rows if r.check == "all_reduce" and r.verdict != "not applicable"]
        reasons = [r.why or "all_reduce failed" for r in reduced if r.verdict != "passed"]
        reasons += [] if reduced else ["no all_reduce was made"]
        us_by_kib = {
            r.measured["size_bytes"] // 1024: float(r.measured["in_a_row_us"])
            for r in rows
            if r.check == "latency"
        }
        reasons += [f"nothing was measured at {s} KiB" for s in sizes if s not in us_by_kib]
        why = reasons[0] if reasons else ""
        tried.append(Tried(setting=setting, refused=why, us_by_kib={} if why else us_by_kib))
    fit = [t for t in tried if not t.refused]
    winners = []
    for load in loads if fit else ():
        costs = [(sum(t.us_by_kib[s] for s in load.sizes_kib), t.setting) for t in fit]
        # of equals the one with fewer variables
        us, best = min(costs, key=lambda x: (x[0], len(x[1].variables)))
        untuned, plain = next((x for x in costs if not x[1].variables), (None, best))
        if untuned is not None and us > untuned * (1 - _GAIN):
            us, best = untuned, plain
        gain = None if untuned is None else round(1 - us / untuned, 4)
        winners.append(Winner(workload=load, setting=best, us=us, us_untuned=untuned, gain=gain))
    return Tuning(ranks=ranks, device=device, tried=tried, winners=winners)
