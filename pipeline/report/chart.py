"""Charts of lines and points as SVG, small enough for a page that works without network.

Colours are classes of the style sheet, so that one drawing is right in light, dark and print. Each
line has a shape of its own besides its colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipeline.report.markup import Markup, element, join, plain_number
from pipeline.report.scale import Scale, linear, logarithmic, stepped, tick_label

# Drawn at this size, and scaled to the width of the screen: text is still readable on a phone.
WIDTH, HEIGHT = 460, 300
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
    across, up = _scales(x, y, lines)
    return element(
        "svg",
        element("title", title, id=f"{name}-t"),
        element("desc", describe(x, y, lines), id=f"{name}-d"),
        _grid(across, up),
        _titles(x, y),
        *(_line(line, across, up) for line in lines),
        _labels(lines, across, up),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        class_="chart",
    )


def describe(x: Axis, y: Axis, lines: Sequence[Line]) -> str:
    """The chart in a sentence for each line, for who cannot see it."""
    return " ".join([f"{y.title} against {x.title}.", *(_told(line) for line in lines)])


def _told(line: Line) -> str:
    if not line.points:
        return f"{line.name}: no values."
    first, last = line.points[0], line.points[-1]
    return f"{line.name}: from {tick_label(first.y)} to {tick_label(last.y)}."


def _scales(x: Axis, y: Axis, lines: Sequence[Line]) -> tuple[Scale, Scale]:
    points = [p for line in lines for p in line.points]
    across = _scale(x.kind, [p.x for p in points], _LEFT, WIDTH - _RIGHT)
    highs = [p.high if p.high is not None else p.y for p in points]
    lows = [p.low if p.low is not None else p.y for p in points]
    return across, _scale(y.kind, [*highs, *lows], HEIGHT - _BOTTOM, _TOP)


def _scale(kind: Kind, values: list[float], start: float, end: float) -> Scale:
    if kind == "stepped":
        return stepped(values, start + 8, end - 8, gap=38)
    if kind == "log":
        return logarithmic((v for v in values if v > 0), start, end)
    return linear(values, start, end)


def _grid(across: Scale, up: Scale) -> Markup:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    rows = "".join(f"M{_LEFT} {plain_number(up.at(t))}H{right}" for t in up.ticks)
    columns = "".join(f"M{plain_number(across.at(t))} {_TOP}V{bottom}" for t in across.ticks)
    y_labels = [
        element("text", tick_label(t), x=_LEFT - 6, y=up.at(t) + 4, text_anchor="end")
        for t in up.ticks
    ]
    x_labels = [
        element("text", tick_label(t), x=across.at(t), y=bottom + 16, text_anchor="middle")
        for t in _apart(across)
    ]
    # hidden from readers of the screen: the description and the table say it better
    grid = element("path", d=rows + columns, class_="grid")
    return element("g", grid, *y_labels, *x_labels, aria_hidden="true", class_="axes")


def _apart(scale: Scale) -> list[float]:
    """Ticks whose labels do not touch."""
    kept: list[float] = []
    for tick in scale.ticks:
        if kept:
            room = (len(tick_label(tick)) + len(tick_label(kept[-1]))) / 2 * _LETTER + 4
            if scale.at(tick) - scale.at(kept[-1]) < room:
                continue
        kept.append(tick)
    return kept


def _titles(x: Axis, y: Axis) -> Markup:
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    below = element(
        "text", x.title, x=(_LEFT + WIDTH - _RIGHT) / 2, y=HEIGHT - 8, text_anchor="middle"
    )
    beside = element(
        "text", y.title, text_anchor="middle", transform=f"translate(12 {middle:g}) rotate(-90)"
    )
    return element("g", below, beside, aria_hidden="true", class_="titles")


def _line(line: Line, across: Scale, up: Scale) -> Markup:
    places = [(across.at(p.x), up.at(p.y)) for p in line.points]
    path = "M" + "L".join(f"{plain_number(x)} {plain_number(y)}" for x, y in places)
    dash = " dashed" if line.is_dashed else ""
    return element(
        "g",
        element("path", d=path, class_=f"line{dash}") if len(places) > 1 else None,
        *(_interval(p, across, up) for p in line.points),
        *(_point(p, line.style, x, y) for p, (x, y) in zip(line.points, places, strict=True)),
        class_=f"series c{line.style % SHAPES}",
        data_series=line.name,
    )


def _interval(point: Point, across: Scale, up: Scale) -> Markup | None:
    """A confidence interval."""
    if point.low is None or point.high is None:
        return None
    x, top, bottom = across.at(point.x), up.at(point.high), up.at(point.low)
    ends = "".join(f"M{x - 4:.1f} {y:.1f}h8" for y in (top, bottom))
    return element("path", d=f"M{x:.1f} {top:.1f}V{bottom:.1f}{ends}", class_="interval")


def _point(point: Point, style: int, x: float, y: float) -> Markup:
    about = element("title", point.about)
    return element("path", about, d=shape(style, x, y), class_="dot" + " open" * point.is_doubtful)


def shape(style: int, x: float, y: float) -> str:
    """The sign of a line, drawn around a point."""
    return f"M{x:.1f} {y:.1f}{_SIGNS[style % SHAPES]}"


@dataclass(frozen=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def touches(self, other: _Box) -> bool:
        beside = self.right <= other.left or other.right <= self.left
        return not (beside or self.bottom <= other.top or other.bottom <= self.top)

    def is_inside(self) -> bool:
        across = self.left >= _LEFT and self.right <= WIDTH - 2
        return across and self.top >= 2 and self.bottom <= HEIGHT - _BOTTOM


def _labels(lines: Iterable[Line], across: Scale, up: Scale) -> Markup | None:
    """Labels beside their points, where there is room; the rest is in the table."""
    points = [(p, line.style) for line in lines for p in line.points]
    places = [(across.at(p.x), up.at(p.y)) for p, _ in points]
    taken = [_Box(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    texts = []
    for (point, style), (x, y) in zip(points, places, strict=True):
        box = _free_place(point.label, x, y, taken) if point.label else None
        if box is None:
            continue
        taken.append(box)
        where = {"x": box.left, "y": box.bottom - 3}
        texts.append(element("text", point.label, **where, class_=f"c{style % SHAPES}"))
    return element("g", *texts, aria_hidden="true", class_="labels") if texts else None


def _free_place(label: str, x: float, y: float, taken: Sequence[_Box]) -> _Box | None:
    wide = len(label) * _LETTER
    lefts_and_bottoms = (
        (x + 7, y - 1),
        (x - wide / 2, y - 6),
        (x - 7 - wide, y - 1),
        (x - wide / 2, y + 6 + _LINE),
        (x + 7, y + 5 + _LINE),
    )
    for left, bottom in lefts_and_bottoms:
        box = _Box(left, bottom - _LINE, left + wide, bottom)
        if box.is_inside() and not any(box.touches(other) for other in taken):
            return box
    return None


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
