"""Bars as SVG: parts of a whole, and one value for each of several configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.bench.metrics import added
from pipeline.report.markup import Markup, element, plain_number
from pipeline.report.scale import linear, tick_label

_WIDTH = 460
_ROW, _THICK, _TOP, _BOTTOM = 46, 20, 4, 40
_LEFT, _RIGHT = 6, 60  # room for the value behind the longest bar
_LETTER = 6.6


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
    height = _TOP + _ROW * len(bars) + _BOTTOM
    totals = [added(part.value for part in bar.parts) for bar in bars]
    scale = linear(totals, _LEFT, _WIDTH - _RIGHT)
    bottom = height - _BOTTOM
    grid = "".join(f"M{plain_number(scale.at(t))} {_TOP}V{bottom}" for t in scale.ticks)
    return element(
        "svg",
        element("title", title, id=f"{name}-t"),
        element("desc", describe(axis, bars), id=f"{name}-d"),
        element("path", d=grid, class_="grid"),
        *(
            element("text", tick_label(t), x=scale.at(t), y=height - 24, text_anchor="middle")
            for t in scale.ticks
        ),
        element("text", axis, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=height - 6, text_anchor="middle"),
        *(_row(bar, _TOP + i * _ROW, scale.at, scale.start) for i, bar in enumerate(bars)),
        viewBox=f"0 0 {_WIDTH} {height}",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        class_="chart bars",
    )


def describe(axis: str, bars: Sequence[Bar]) -> str:
    """The chart in a sentence for each row, for who cannot see it."""
    rows = (f"{b.title}: {', '.join(f'{p.name} {p.text}' for p in b.parts)}." for b in bars)
    return " ".join([f"{axis}.", *rows])


def _row(bar: Bar, top: float, at: Callable[[float], float], start: float) -> Markup:
    pieces: list[Markup] = []
    done, left = 0.0, start
    for part in bar.parts:
        done += part.value
        right = at(done)
        pieces.append(_piece(part, left, right, top + 19, is_last=part is bar.parts[-1]))
        left = right
    title = element("text", bar.title, x=start, y=top + 14, class_="row")
    return element("g", title, *pieces)


def _piece(part: Part, left: float, right: float, top: float, *, is_last: bool) -> Markup:
    about = element("title", f"{part.name}: {part.text}")
    box = element("rect", about, x=left, y=top, width=max(right - left, 1), height=_THICK)
    text, wide, colour = None, len(part.text) * _LETTER, f"c{part.style}"
    if right - left > wide + 6:
        middle = (left + right) / 2
        text = element("text", part.text, x=middle, y=top + 14, text_anchor="middle", class_="in")
    elif is_last:
        text = element("text", part.text, x=right + 5, y=top + 14)
    return element("g", box, text, class_=f"part {colour}")
