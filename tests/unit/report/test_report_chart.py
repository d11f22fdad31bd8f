from __future__ import annotations

import re
from typing import Literal
from xml.etree import ElementTree

import pytest

from pipeline.serving.report.chart import (
    HEIGHT,
    WIDTH,
    Axis,
    BarPart,
    ChartBar,
    Line,
    Point,
    bar_chart,
    line_chart,
)

SVG = ElementTree.Element


def parsed(text: str) -> SVG:
    return ElementTree.fromstring(text)


def line(*values: float, name: str = "a", style: int = 0) -> Line:
    points = tuple(Point(float(i + 1), value, f"{value}") for i, value in enumerate(values))
    return Line(name, points, style)


def drawn(*lines: Line) -> SVG:
    return parsed(line_chart("k", "A chart", Axis("load"), Axis("speed, tok/s"), lines))


def places(chart: SVG) -> list[tuple[float, float]]:
    paths = [p.get("d", "") for p in chart.iter("path") if p.get("class", "").startswith("dot")]
    found = [re.match(r"M([\d.]+) ([\d.]+)", path) for path in paths]
    return [(float(m[1]), float(m[2])) for m in found if m]


def test_a_larger_value_stands_higher_and_a_later_one_further_right() -> None:
    (x1, y1), (x2, y2) = places(drawn(line(10, 20)))
    assert x1 < x2
    assert y1 > y2


def test_every_point_stands_on_the_paper() -> None:
    for x, y in places(drawn(line(0, 1e6, 3), line(5, 5, 5))):
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT


def test_a_chart_has_a_title_and_a_description_for_who_cannot_see_it() -> None:
    chart = drawn(line(10, 20, name="model"))
    assert chart.get("role") == "img"
    assert chart.get("aria-labelledby") == "k-t k-d"
    assert chart.findtext("title") == "A chart"
    assert chart.findtext("desc") == "speed, tok/s against load. model: from 10 to 20."


def test_every_point_says_what_it_is() -> None:
    chart = drawn(line(10, 20))
    titles = [p.findtext("title") for p in chart.iter("path") if p.get("class") == "dot"]
    assert titles == ["10", "20"]


def test_two_lines_differ_in_shape_and_not_in_colour_alone() -> None:
    chart = drawn(line(1, 2), line(1, 2, name="b", style=1))
    shapes = {
        re.sub(r"^M\S+ [\d.]+", "", p.get("d", ""))
        for p in chart.iter("path")
        if p.get("class") == "dot"
    }
    assert len(shapes) == 2


def test_a_confidence_interval_is_drawn_within_the_chart() -> None:
    point = Point(1, 100, "p", low=50, high=180)
    chart = drawn(Line("a", (point,), 0))
    (path,) = [p.get("d", "") for p in chart.iter("path") if p.get("class") == "interval"]
    assert all(0 <= float(y) <= HEIGHT for y in re.findall(r"V([\d.]+)", path))


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_an_interval_that_reaches_below_zero_can_be_drawn(kind: Literal["linear", "log"]) -> None:
    lines = [Line("a", (Point(1, 100, "p", low=-50, high=250), Point(2, 300, "q")), 0)]
    chart = parsed(line_chart("k", "t", Axis("load"), Axis("ms", kind), lines))
    (path,) = [p.get("d", "") for p in chart.iter("path") if p.get("class") == "interval"]
    assert all(0 <= float(y) <= HEIGHT for y in re.findall(r"V([\d.]+)", path))


def test_a_name_of_a_run_cannot_become_markup() -> None:
    text = line_chart("k", "t", Axis("x"), Axis("y"), [line(1, 2, name='<script>"&')])
    assert "<script>" not in text
    assert parsed(text).find("./g[@data-series]").get("data-series") == '<script>"&'  # type: ignore[union-attr]


def test_labels_never_touch_each_other() -> None:
    near = tuple(Point(10 + i / 50, 100 + i, "p", label=f"{1000 + i}") for i in range(12))
    chart = drawn(Line("a", near, 0))
    boxes = [
        (float(t.get("x", "")), float(t.get("y", "")), len(t.text or "") * 6.6)
        for t in chart.iter("text")
        if t.get("class") == "c0"
    ]
    assert boxes
    for i, (x1, y1, wide1) in enumerate(boxes):
        for x2, y2, _ in boxes[i + 1 :]:
            assert abs(y1 - y2) >= 12.99 or x1 + wide1 <= x2 or x2 + wide1 <= x1


def test_a_chart_without_points_is_still_a_chart() -> None:
    assert drawn(Line("a", (), 0)).findtext("desc") == "speed, tok/s against load. a: no values."


def bars(*values: float) -> SVG:
    parts = tuple(BarPart(f"p{i}", value, f"{value}", i) for i, value in enumerate(values))
    return parsed(bar_chart("k", "Memory", "GB", [ChartBar("GPU 0", parts)]))


def test_parts_of_a_bar_lie_in_a_row_and_are_as_wide_as_their_values() -> None:
    rects = [(float(r.get("x", "")), float(r.get("width", ""))) for r in bars(60, 30).iter("rect")]
    (x1, wide1), (x2, wide2) = rects
    assert abs(x1 + wide1 - x2) < 0.1
    assert abs(wide1 / wide2 - 2) < 0.01


def test_a_part_too_narrow_for_its_text_has_none_inside() -> None:
    texts = [t.text for t in bars(90, 0.3, 5).iter("text") if t.get("class") == "in"]
    assert texts == ["90", "5"]


def test_the_description_of_bars_has_every_value() -> None:
    assert bars(60, 0.3).findtext("desc") == "GB. GPU 0: p0 60, p1 0.3."
