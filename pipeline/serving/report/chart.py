"""Charts of lines, points and bars as SVG, small enough for a page that works without network.

Colours are classes of the style sheet, so that one drawing is right in light, dark and print. Each
line has a shape of its own besides its colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from pipeline.serving.bench.metrics import added
from pipeline.serving.report.markup import Markup, element, join, plain_number

# Drawn at this size, and scaled to the width of the screen: text is still readable on a phone.
WIDTH, HEIGHT = 460, 300
# Room for the labels and titles of both axes.
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 14, 14, 46
_LETTER, _LINE = 6.6, 13.0  # of a 12 px font, for labels that must not touch
# A sign of its own for each line, so that colour is not the only difference: circle, square,
# triangles, diamond, cross.
_SIGNS = (
    "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0Z",
    "m-4-4h8v8h-8Z",
    "m0-5l5.3 9h-10.6Z",
    "m0-5.5l5.5 5.5l-5.5 5.5l-5.5-5.5Z",
    "m0 5l5.3-9h-10.6Z",
    "m-1.5-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
)
SHAPES = len(_SIGNS)
Kind: TypeAlias = Literal["linear", "log", "stepped"]
# Steps between ticks that people count in.
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
    # 1.1 / 0.1 is a little more than 11
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


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit."""

    title: str
    kind: Kind = "linear"


@dataclass(frozen=True)
class Point:
    """One measured value; `about` is shown when it is pointed at."""

    x: float
    y: float
    about: str
    label: str = ""
    low: float | None = None
    high: float | None = None
    is_doubtful: bool = False


@dataclass(frozen=True)
class Line:
    """Points of one kind, in order."""

    name: str
    points: tuple[Point, ...]
    style: int
    is_dashed: bool = False


def line_chart(name: str, title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Markup:
    """A chart; `name` is unique on its page."""
    points = [p for line in lines for p in line.points]
    across = _scale(x.kind, [p.x for p in points], _LEFT, WIDTH - _RIGHT)
    # intervals must fit on the chart, too
    highs = [p.high if p.high is not None else p.y for p in points]
    lows = [p.low if p.low is not None else p.y for p in points]
    up = _scale(y.kind, [*highs, *lows], HEIGHT - _BOTTOM, _TOP)
    # a sentence for each line, for people who cannot see the chart
    about = [f"{y.title} against {x.title}."]
    for line in lines:
        if line.points:
            first, last = tick_label(line.points[0].y), tick_label(line.points[-1].y)
            about.append(f"{line.name}: from {first} to {last}.")
        else:
            about.append(f"{line.name}: no values.")
    return element(
        "svg",
        element("title", title, id=f"{name}-t"),
        element("desc", " ".join(about), id=f"{name}-d"),
        _axes(x, y, across, up),
        *(_line(line, across, up) for line in lines),
        _labels(lines, across, up),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        class_="chart",
    )


def _scale(kind: Kind, values: list[float], start: float, end: float) -> Scale:
    if kind == "stepped":
        return stepped(values, start + 8, end - 8, gap=38)
    if kind == "log":
        return logarithmic((v for v in values if v > 0), start, end)
    return linear(values, start, end)


def _axes(x: Axis, y: Axis, across: Scale, up: Scale) -> Markup:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    rows = "".join(f"M{_LEFT} {plain_number(up.at(t))}H{right}" for t in up.ticks)
    columns = "".join(f"M{plain_number(across.at(t))} {_TOP}V{bottom}" for t in across.ticks)
    labels = [
        element("text", tick_label(t), x=_LEFT - 6, y=up.at(t) + 4, text_anchor="end")
        for t in up.ticks
    ]
    labelled: list[float] = []
    for tick in across.ticks:
        text = tick_label(tick)
        if labelled:
            # labels do not touch
            room = (len(text) + len(tick_label(labelled[-1]))) / 2 * _LETTER + 4
            if across.at(tick) - across.at(labelled[-1]) < room:
                continue
        labelled.append(tick)
        labels.append(element("text", text, x=across.at(tick), y=bottom + 16, text_anchor="middle"))
    grid = element("path", d=rows + columns, class_="grid")
    middle, centre = (_TOP + bottom) / 2, (_LEFT + right) / 2
    turned = f"translate(12 {middle:g}) rotate(-90)"
    titles = (
        element("text", x.title, x=centre, y=HEIGHT - 8, text_anchor="middle"),
        element("text", y.title, text_anchor="middle", transform=turned),
    )
    # hidden from readers of the screen: the description and the table say it better
    return join(
        element("g", grid, *labels, aria_hidden="true", class_="axes"),
        element("g", *titles, aria_hidden="true", class_="titles"),
    )


def _line(line: Line, across: Scale, up: Scale) -> Markup:
    places = [(across.at(p.x), up.at(p.y)) for p in line.points]
    path = "M" + "L".join(f"{plain_number(x)} {plain_number(y)}" for x, y in places)
    dash = " dashed" if line.is_dashed else ""
    intervals, dots = [], []
    for point, (x, y) in zip(line.points, places, strict=True):
        if point.low is not None and point.high is not None:
            top, bottom = up.at(point.high), up.at(point.low)
            ends = "".join(f"M{x - 4:.1f} {end:.1f}h8" for end in (top, bottom))
            whole = f"M{x:.1f} {top:.1f}V{bottom:.1f}{ends}"
            intervals.append(element("path", d=whole, class_="interval"))
        look = "dot" + " open" * point.is_doubtful
        about = element("title", point.about)
        dots.append(element("path", about, d=shape(line.style, x, y), class_=look))
    return element(
        "g",
        element("path", d=path, class_=f"line{dash}") if len(places) > 1 else None,
        *intervals,
        *dots,
        class_=f"series c{line.style % SHAPES}",
        data_series=line.name,
    )


def shape(style: int, x: float, y: float) -> str:
    """The sign of a line, drawn around a point."""
    return f"M{x:.1f} {y:.1f}{_SIGNS[style % SHAPES]}"


class _Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def touches(self, other: _Area) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)


def _labels(lines: Iterable[Line], across: Scale, up: Scale) -> Markup | None:
    """Labels beside their points, where there is room; the rest is in the table."""
    points = [(p, line.style) for line in lines for p in line.points]
    places = [(across.at(p.x), up.at(p.y)) for p, _ in points]
    taken = [_Area(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    texts = []
    for (point, style), (x, y) in zip(points, places, strict=True):
        wide = len(point.label) * _LETTER
        # right, above, left, below, right and below: the first that is free
        lefts_and_bottoms = (
            (x + 7, y - 1),
            (x - wide / 2, y - 6),
            (x - 7 - wide, y - 1),
            (x - wide / 2, y + 6 + _LINE),
            (x + 7, y + 5 + _LINE),
        )
        for left, bottom in lefts_and_bottoms if point.label else ():
            area = _Area(left, bottom - _LINE, left + wide, bottom)
            is_across = area.left >= _LEFT and area.right <= WIDTH - 2
            is_inside = is_across and area.top >= 2 and area.bottom <= HEIGHT - _BOTTOM
            if is_inside and not any(area.touches(other) for other in taken):
                taken.append(area)
                look = f"c{style % SHAPES}"
                texts.append(element("text", point.label, x=left, y=bottom - 3, class_=look))
                break
    return element("g", *texts, aria_hidden="true", class_="labels") if texts else None


def swatch(style: int, is_dashed: bool = False) -> Markup:
    """The sign of a line for a legend."""
    line = element("path", d="M1 7H27", class_="line" + " dashed" * is_dashed)
    dot = element("path", d=shape(style, 14, 7), class_="dot")
    return element(
        "svg",
        join(line, dot),
        viewBox="0 0 28 14",
        width=28,
        height=14,
        aria_hidden="true",
        class_=f"swatch c{style % SHAPES}",
    )


_ROW, _THICK, _BAR_TOP, _BAR_BOTTOM = 46, 20, 4, 40
_BAR_LEFT, _BAR_RIGHT = 6, 60  # room for the value after the longest bar


@dataclass(frozen=True)
class Part:
    """A piece of a bar; `style` is its colour."""

    name: str
    value: float
    text: str
    style: int


@dataclass(frozen=True)
class Bar:
    """One row."""

    title: str
    parts: tuple[Part, ...]


def bar_chart(name: str, title: str, axis: str, bars: Sequence[Bar]) -> Markup:
    """Rows below each other, their parts in a row; `name` is unique on its page."""
    height = _BAR_TOP + _ROW * len(bars) + _BAR_BOTTOM
    totals = [added(part.value for part in bar.parts) for bar in bars]
    scale = linear(totals, _BAR_LEFT, WIDTH - _BAR_RIGHT)
    bottom = height - _BAR_BOTTOM
    grid = "".join(f"M{plain_number(scale.at(t))} {_BAR_TOP}V{bottom}" for t in scale.ticks)
    centre = (_BAR_LEFT + WIDTH - _BAR_RIGHT) / 2
    # a sentence for each row, for people who cannot see the chart
    rows = (f"{b.title}: {', '.join(f'{p.name} {p.text}' for p in b.parts)}." for b in bars)
    return element(
        "svg",
        element("title", title, id=f"{name}-t"),
        element("desc", " ".join([f"{axis}.", *rows]), id=f"{name}-d"),
        element("path", d=grid, class_="grid"),
        *(
            element("text", tick_label(t), x=scale.at(t), y=height - 24, text_anchor="middle")
            for t in scale.ticks
        ),
        element("text", axis, x=centre, y=height - 6, text_anchor="middle"),
        *(_bar(bar, _BAR_TOP + i * _ROW, scale) for i, bar in enumerate(bars)),
        viewBox=f"0 0 {WIDTH} {height}",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        class_="chart bars",
    )


def _bar(bar: Bar, top: float, scale: Scale) -> Markup:
    pieces = [element("text", bar.title, x=scale.start, y=top + 14, class_="row")]
    done, left = 0.0, scale.start
    for part in bar.parts:
        done += part.value
        right, y = scale.at(done), top + 33
        about = element("title", f"{part.name}: {part.text}")
        # also next to nothing is seen
        width = max(right - left, 1)
        body = element("rect", about, x=left, y=top + 19, width=width, height=_THICK)
        text = None
        # in the bar where it fits, else after the last part
        if right - left > len(part.text) * _LETTER + 6:
            where = {"x": (left + right) / 2, "y": y}
            text = element("text", part.text, **where, text_anchor="middle", class_="in")
        elif part is bar.parts[-1]:
            text = element("text", part.text, x=right + 5, y=y)
        pieces.append(element("g", body, text, class_=f"part c{part.style}"))
        left = right
    return element("g", *pieces)
