"""The cards while a trial runs: power, clocks, what slows them, memory, and the PCIe link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from pipeline.bench.metrics import added
from pipeline.bench.model import GpuSeries, Mark
from pipeline.host.facts.model import Gpu
from pipeline.host.facts.smi import read_gpus, read_log, text_at
from pipeline.known import Known, Unknown, then, unknown

Value = TypeVar("Value")
# Not a slowdown: clocks that somebody set on purpose.
_HARMLESS = ("applications_clocks_setting", "display_clocks_setting")


@dataclass(frozen=True)
class CardReading:
    """One card at one time."""

    gpu: Gpu
    temperature_c: float | None
    memory_used_bytes: int | None
    utilization_percent: float | None


Readings = Sequence[tuple[float, Sequence[CardReading]]]


def read_cards(text: str) -> Known[list[CardReading]]:
    """Every card, from `nvidia-smi -q -x`."""
    gpus, root = read_gpus(text, unknown("not asked for")), read_log(text)
    if isinstance(gpus, Unknown):
        return gpus
    if isinstance(root, Unknown):
        return root
    return [
        CardReading(
            gpu=gpu,
            temperature_c=_plain(then(text_at(card, "temperature/gpu_temp"), _number)),
            memory_used_bytes=_plain(then(text_at(card, "fb_memory_usage/used"), _mebibytes)),
            utilization_percent=_plain(then(text_at(card, "utilization/gpu_util"), _number)),
        )
        for gpu, card in zip(gpus, root.findall("gpu"), strict=True)
    ]


def _number(text: str) -> Known[float]:
    # such as `61 C` and `98 %`
    return float(text.split()[0])


def _mebibytes(text: str) -> Known[int]:
    return int(text.split()[0]) << 20


def _plain(value: Known[Value]) -> Value | None:
    return None if isinstance(value, Unknown) else value


def gpu_series(readings: Readings) -> list[GpuSeries]:
    """A trial's readings, one series for each card; a card that got lost ends them all."""
    if not readings:
        return []
    cards = len(readings[0][1])
    same = [(at, each) for at, each in readings if len(each) == cards]
    return [_series([(at, each[index]) for at, each in same]) for index in range(cards)]


def _series(readings: Sequence[tuple[float, CardReading]]) -> GpuSeries:
    gpu = readings[0][1].gpu

    def every(read: Callable[[Gpu], Known[Value]]) -> list[Value | None]:
        return [_plain(read(reading.gpu)) for _, reading in readings]

    slowed = every(lambda each: each.slowed_by)
    return GpuSeries(
        index=gpu.index,
        name=_plain(gpu.name) or "unknown",
        uuid=_plain(gpu.uuid) or "",
        at_s=[round(at, 3) for at, _ in readings],
        power_w=every(lambda each: each.power.draw_w),
        sm_clock_mhz=every(lambda each: each.clocks.sm_mhz),
        memory_clock_mhz=every(lambda each: each.clocks.memory_mhz),
        temperature_c=[reading.temperature_c for _, reading in readings],
        memory_used_bytes=[reading.memory_used_bytes for _, reading in readings],
        utilization_percent=[reading.utilization_percent for _, reading in readings],
        throttle=[[why for why in each or [] if why not in _HARMLESS] for each in slowed],
        pcie_generation=every(lambda each: each.link.generation),
        pcie_width=every(lambda each: each.link.width),
        pcie_generation_most=_plain(gpu.link.generation_max),
        pcie_width_most=_plain(gpu.link.width_max),
        pcie_replays=every(lambda each: each.link.replays),
    )


def energy_j(series: Sequence[GpuSeries]) -> float | None:
    """Of all cards over the readings, by the trapezoid rule; none where a card does not say."""
    total = 0.0
    for card in series:
        points = [(at, w) for at, w in zip(card.at_s, card.power_w, strict=True) if w is not None]
        if len(points) < 2:
            return None
        total += added((b - a) * (v + w) / 2 for (a, v), (b, w) in pairwise(points))
    return total if series else None


def gpu_marks(series: Sequence[GpuSeries]) -> list[Mark]:
    """Cards that were slowed down, and links that erred."""
    return [mark for card in series for mark in (*_slowed(card), *_link_errors(card))]


def _slowed(card: GpuSeries) -> list[Mark]:
    reasons = sorted({why for each in card.throttle for why in each})
    times = sum(1 for each in card.throttle if each)
    if not reasons:
        return []
    message = f"GPU {card.index}: {', '.join(reasons)} in {times} of {len(card.at_s)} samples"
    return [Mark(kind="throttled", message=message)]


def _link_errors(card: GpuSeries) -> list[Mark]:
    marks = []
    counts = [count for count in card.pcie_replays if count is not None]
    if counts and counts[-1] > counts[0]:
        message = f"GPU {card.index}: {counts[-1] - counts[0]} PCIe replays"
        marks.append(Mark(kind="link-errors", message=message))
    widths = [width for width in card.pcie_width if width is not None]
    if card.pcie_width_most and widths and min(widths) < card.pcie_width_most:
        message = f"GPU {card.index}: PCIe x{min(widths)} of x{card.pcie_width_most}"
        marks.append(Mark(kind="link-errors", message=message))
    # a card at rest lowers its generation by itself: the best of a trial is what it had under load
    speeds = [speed for speed in card.pcie_generation if speed is not None]
    if card.pcie_generation_most and speeds and max(speeds) < card.pcie_generation_most:
        message = f"GPU {card.index}: PCIe {max(speeds)}.0 of {card.pcie_generation_most}.0"
        marks.append(Mark(kind="link-errors", message=message))
    return marks
