"""Charts of lines, points and bars as SVG, small enough for a page that works without network.

Colours are classes of the style sheet, so that one drawing is right in light, dark and print. Each
line has a shape of its own besides its colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from pipeline.serving.bench.metrics import added
from pipeline.serving.report.markup import Child, Markup, element, plain_number

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
# stepped: logarithmic, with the measured values themselves as ticks
Kind: TypeAlias = Literal["linear", "log", "stepped"]
# Steps between ticks that people count in.
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
_MOST_STEPS = 5
# A log axis with this many decades or more has ticks at powers of ten alone.
_MANY_DECADES = 2.5
# Of a stepped axis: from each end of the chart to its first tick, and between two of them.
_INSET, _LEAST_GAP = 8, 38


class ChartScale(NamedTuple):
    """Values between `low` and `high`, on paper from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...] = ()
    is_log: bool = False

    def at(self, value: float) -> float:
        """Where a value is; one below the axis, such as an interval's end, is at the axis' end."""
        low, high, place = self.low, self.high, max(value, self.low)
        if self.is_log:
            low, high, place = math.log10(low), math.log10(high), math.log10(place)
        return self.start + (place - low) / (high - low) * (self.end - self.start)


def scale(kind: Kind, values: Iterable[float], start: float, end: float) -> ChartScale:
    """An axis that has room for all values; below zero nothing is measured."""
    if kind == "linear":
        # from zero to a round number above the largest value
        largest = max(values, default=0.0)
        at_least = (largest or 1.0) / _MOST_STEPS
        power = 10.0 ** math.floor(math.log10(at_least))
        step = next(f * power for f in _ROUND if f * power >= at_least * 0.999999)
        # 1.1 / 0.1 is a little more than 11
        steps = max(1, math.ceil(round(largest / step, 9)))
        ticks = tuple(round(i * step, 12) for i in range(steps + 1))
        return ChartScale(0.0, ticks[-1], start, end, ticks)
    known = sorted({value for value in values if value > 0}) or [1.0]
    low, high = known[0], known[-1]
    if low == high or (kind == "log" and high / low < 2):
        # a single value, or nearly: it stands in the middle
        low, high = low / 2, high * 2
    if kind == "log":
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        few = math.log10(high / low) < _MANY_DECADES
        all_ticks = [f * 10.0**d for d in decades for f in ((1, 2, 5) if few else (1,))]
        below = max((t for t in all_ticks if t <= low), default=low)
        above = min((t for t in all_ticks if t >= high), default=high)
        ticks = tuple(t for t in all_ticks if below <= t <= above)
        return ChartScale(below, above, start, end, ticks, is_log=True)
    whole = ChartScale(low, high, start + _INSET, end - _INSET, is_log=True)
    # from the largest down: the end of a sweep is what readers look for
    spaced: list[float] = []
    for value in reversed(known):
        if not spaced or abs(whole.at(value) - whole.at(spaced[-1])) >= _LEAST_GAP:
            spaced.append(value)
    return whole._replace(ticks=tuple(reversed(spaced)))


def tick_label(value: float) -> str:
    """2500 -> '2,500', 0.25 -> '0.25', 150000 -> '150k'."""
    if value >= 100_000 and value % 100 == 0:
        return f"{value / 1000:,.10g}k"
    return f"{value:,.10g}"


class Axis(NamedTuple):
    """What an axis shows, with its unit."""

    title: str
    kind: Kind = "linear"


class Point(NamedTuple):
    """One measured value; `about` is shown when it is pointed at."""

    x: float
    y: float
    about: str
    label: str = ""
    low: float | None = None
    high: float | None = None
    is_doubtful: bool = False


class Line(NamedTuple):
    """Points of one kind, in order."""

    name: str
    points: tuple[Point, ...]
    style: int
    is_dashed: bool = False

    @property
    def colour(self) -> str:
        return f"c{self.style % len(_SIGNS)}"

    def sign(self, x: float, y: float) -> str:
        """The sign of a line, drawn around a point."""
        return f"M{x:.1f} {y:.1f}{_SIGNS[self.style % len(_SIGNS)]}"

    def swatch(self) -> Markup:
        """The sign of a line for a legend."""
        line = element("path", d="M1 7H27", class_="line" + " dashed" * self.is_dashed)
        dot = element("path", d=self.sign(14, 7), class_="dot")
        size = {"viewBox": "0 0 28 14", "width": "28", "height": "14", "aria_hidden": "true"}
        return element("svg", line, dot, **size, class_=f"swatch {self.colour}")


def _svg(key: str, title: str, about: list[str], size: str, look: str, *parts: Child) -> Markup:
    """A drawing, with a sentence about each of its parts for people who cannot see it."""
    return element(
        "svg",
        element("title", title, id=f"{key}-t"),
        element("desc", " ".join(about), id=f"{key}-d"),
        *parts,
        viewBox=size,
        role="img",
        aria_labelledby=f"{key}-t {key}-d",
        class_=look,
    )


def line_chart(name: str, title: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Markup:
    """A chart; `name` is unique on its page."""
    points = [p for line in lines for p in line.points]
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    across = scale(x.kind, [p.x for p in points], _LEFT, right)
    # intervals must fit on the chart, too
    highs = [p.high if p.high is not None else p.y for p in points]
    lows = [p.low if p.low is not None else p.y for p in points]
    up = scale(y.kind, [*highs, *lows], bottom, _TOP)
    about = [f"{y.title} against {x.title}."]
    for line in lines:
        ends = [tick_label(line.points[i].y) for i in (0, -1)] if line.points else []
        about.append(f"{line.name}: {'from {} to {}'.format(*ends) if ends else 'no values'}.")
    rows = "".join(f"M{_LEFT} {plain_number(up.at(t))}H{right}" for t in up.ticks)
    columns = "".join(f"M{plain_number(across.at(t))} {_TOP}V{bottom}" for t in across.ticks)
    labels = [
        element("text", tick_label(t), x=_LEFT - 6, y=up.at(t) + 4, text_anchor="end")
        for t in up.ticks
    ]
    before: float | None = None
    for tick in across.ticks:
        text, place = tick_label(tick), across.at(tick)
        if before is not None:
            # labels do not touch
            room = (len(text) + len(tick_label(before))) / 2 * _LETTER + 4
            if place - across.at(before) < room:
                continue
        before = tick
        labels.append(element("text", text, x=place, y=bottom + 16, text_anchor="middle"))
    grid = element("path", d=rows + columns, class_="grid")
    turned = f"translate(12 {(_TOP + bottom) / 2:g}) rotate(-90)"
    centre = (_LEFT + right) / 2
    below = element("text", x.title, x=centre, y=HEIGHT - 8, text_anchor="middle")
    beside = element("text", y.title, text_anchor="middle", transform=turned)
    # hidden from readers of the screen: the description and the table say it better
    axes = (
        element("g", grid, *labels, aria_hidden="true", class_="axes"),
        element("g", below, beside, aria_hidden="true", class_="titles"),
    )
    drawn = [_line(line, across, up) for line in lines]
    size = f"0 0 {WIDTH} {HEIGHT}"
    return _svg(name, title, about, size, "chart", *axes, *drawn, _labels(lines, across, up))


def _line(line: Line, across: ChartScale, up: ChartScale) -> Markup:
    places = [(across.at(p.x), up.at(p.y)) for p in line.points]
    path = "M" + "L".join(f"{plain_number(x)} {plain_number(y)}" for x, y in places)
    look = "line" + " dashed" * line.is_dashed
    intervals, dots = [], []
    for point, (x, y) in zip(line.points, places, strict=True):
        if point.low is not None and point.high is not None:
            top, bottom = up.at(point.high), up.at(point.low)
            ends = "".join(f"M{x - 4:.1f} {end:.1f}h8" for end in (top, bottom))
            whole = f"M{x:.1f} {top:.1f}V{bottom:.1f}{ends}"
            intervals.append(element("path", d=whole, class_="interval"))
        kind, about = "dot" + " open" * point.is_doubtful, element("title", point.about)
        dots.append(element("path", about, d=line.sign(x, y), class_=kind))
    joined = element("path", d=path, class_=look) if len(places) > 1 else None
    look = f"series {line.colour}"
    return element("g", joined, *intervals, *dots, class_=look, data_series=line.name)


def _labels(lines: Iterable[Line], across: ChartScale, up: ChartScale) -> Markup | None:
    """Labels beside their points, where there is room; the rest is in the table."""
    placed = [(line, p, across.at(p.x), up.at(p.y)) for line in lines for p in line.points]
    # left, top, right, bottom of each sign, and of each label that has found its place
    taken = [(x - 5, y - 5, x + 5, y + 5) for _, _, x, y in placed]
    texts = []
    for line, point, x, y in placed:
        wide = len(point.label) * _LETTER
        # right, above, left, below, right and below: the first that is free
        lefts_and_bottoms = (
            *((x + 7, y - 1), (x - wide / 2, y - 6), (x - 7 - wide, y - 1)),
            *((x - wide / 2, y + 6 + _LINE), (x + 7, y + 5 + _LINE)),
        )
        for left, bottom in lefts_and_bottoms if point.label else ():
            right, top = left + wide, bottom - _LINE
            is_across = left >= _LEFT and right <= WIDTH - 2
            is_inside = is_across and top >= 2 and bottom <= HEIGHT - _BOTTOM
            is_free = all(
                right <= x1 or x2 <= left or bottom <= y1 or y2 <= top for x1, y1, x2, y2 in taken
            )
            if is_inside and is_free:
                taken.append((left, top, right, bottom))
                label = element("text", point.label, x=left, y=bottom - 3, class_=line.colour)
                texts.append(label)
                break
    return element("g", *texts, aria_hidden="true", class_="labels") if texts else None


_ROW, _THICK, _BAR_TOP, _BAR_BOTTOM = 46, 20, 4, 40
_BAR_LEFT, _BAR_RIGHT = 6, 60  # room for the value after the longest bar


class BarPart(NamedTuple):
    """A piece of a bar; `style` is its colour."""

    name: str
    value: float
    text: str
    style: int


class ChartBar(NamedTuple):
    """One row."""

    title: str
    parts: tuple[BarPart, ...]


def bar_chart(name: str, title: str, axis: str, bars: Sequence[ChartBar]) -> Markup:
    """Rows below each other, their parts in a row; `name` is unique on its page."""
    height = _BAR_TOP + _ROW * len(bars) + _BAR_BOTTOM
    totals = [added(part.value for part in bar.parts) for bar in bars]
    across = scale("linear", totals, _BAR_LEFT, WIDTH - _BAR_RIGHT)
    bottom, centre = height - _BAR_BOTTOM, (_BAR_LEFT + WIDTH - _BAR_RIGHT) / 2
    grid = "".join(f"M{plain_number(across.at(t))} {_BAR_TOP}V{bottom}" for t in across.ticks)
    drawn = [element("path", d=grid, class_="grid")]
    drawn += [
        element("text", tick_label(t), x=across.at(t), y=height - 24, text_anchor="middle")
        for t in across.ticks
    ]
    drawn.append(element("text", axis, x=centre, y=height - 6, text_anchor="middle"))
    for top, bar in zip(range(_BAR_TOP, bottom, _ROW), bars, strict=True):
        pieces = [element("text", bar.title, x=_BAR_LEFT, y=top + 14, class_="row")]
        done, left = 0.0, across.start
        for part in bar.parts:
            done += part.value
            right, y, text = across.at(done), top + 33, None
            about = element("title", f"{part.name}: {part.text}")
            # also next to nothing is seen
            width = max(right - left, 1)
            body = element("rect", about, x=left, y=top + 19, width=width, height=_THICK)
            # in the bar where it fits, else after the last part
            if right - left > len(part.text) * _LETTER + 6:
                where = {"x": (left + right) / 2, "y": y}
                text = element("text", part.text, **where, text_anchor="middle", class_="in")
            elif part is bar.parts[-1]:
                text = element("text", part.text, x=right + 5, y=y)
            pieces.append(element("g", body, text, class_=f"part c{part.style}"))
            left = right
        drawn.append(element("g", *pieces))
    rows = (f"{b.title}: {', '.join(f'{p.name} {p.text}' for p in b.parts)}." for b in bars)
    size = f"0 0 {WIDTH} {height}"
    return _svg(name, title, [f"{axis}.", *rows], size, "chart bars", *drawn)
