"""From values to places on paper: linear and logarithmic scales with round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
# A log axis with this many decades or more has ticks at powers of ten alone.
_MANY_DECADES = 2.5


@dataclass(frozen=True)
class Scale:
    """Values between `low` and `high`, on paper from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value is; what lies below the axis, as an interval's end may, is at its end."""
        low, high, place = self.low, self.high, max(value, self.low)
        if self.is_log:
            low, high, place = math.log10(low), math.log10(high), math.log10(place)
        share = (place - low) / (high - low)
        return self.start + share * (self.end - self.start)


def linear(values: Iterable[float], start: float, end: float, most_ticks: int = 6) -> Scale:
    """From zero to a round number above the largest value; below zero nothing is measured."""
    largest = max(values, default=0.0)
    at_least = (largest or 1.0) / (most_ticks - 1)
    power = 10.0 ** math.floor(math.log10(at_least))
    step = next(f * power for f in _ROUND if f * power >= at_least * 0.999999)
    steps = max(1, math.ceil(round(largest / step, 9)))
    ticks = tuple(round(i * step, 12) for i in range(steps + 1))
    return Scale(0.0, ticks[-1], start, end, ticks)


def logarithmic(values: Iterable[float], start: float, end: float) -> Scale:
    """Around values that are above zero, with ticks at 1, 2, 5 or at powers of ten."""
    known = list(values) or [1.0, 10.0]
    low, high = min(known), max(known)
    if high / low < 2:
        # a single value, or nearly: it stands in the middle
        low, high = low / 2, high * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = math.log10(high / low) < _MANY_DECADES
    all_ticks = [f * 10.0**d for d in decades for f in ((1, 2, 5) if few else (1,))]
    below = max((t for t in all_ticks if t <= low), default=low)
    above = min((t for t in all_ticks if t >= high), default=high)
    ticks = tuple(t for t in all_ticks if below <= t <= above)
    return Scale(below, above, start, end, ticks, is_log=True)


def stepped(values: Sequence[float], start: float, end: float, gap: float) -> Scale:
    """A log scale whose ticks are the measured values themselves, as far as there is room."""
    known = sorted(set(values)) or [1.0]
    low, high = known[0], known[-1]
    if low == high:
        low, high = low / 2, high * 2
    scale = Scale(low, high, start, end, (), is_log=True)
    # from the largest down: the end of a sweep is what readers look for
    kept: list[float] = []
    for value in reversed(known):
        if not kept or abs(scale.at(value) - scale.at(kept[-1])) >= gap:
            kept.append(value)
    return Scale(low, high, start, end, tuple(reversed(kept)), is_log=True)


def tick_label(value: float) -> str:
    """2500 -> '2,500', 0.25 -> '0.25', 150000 -> '150k'."""
    if value >= 100_000 and value % 100 == 0:
        return f"{value / 1000:,.10g}k"
    return f"{value:,.10g}"
