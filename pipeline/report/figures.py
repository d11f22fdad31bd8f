"""Charts of a report: what is drawn against what, with its legend and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.report.bars import Bar, Part, bar_chart
from pipeline.report.cells import Load, digits, load_of
from pipeline.report.chart import Axis, Line, Point, line_chart, swatch
from pipeline.report.markup import Markup, element, join
from pipeline.report.model import Cell, Measured, Memory, Reference, Series, shown
from pipeline.report.pointer import step
from pipeline.report.view import Column, Row, View, table

# What is drawn of a series whose cells are no loads.
_CONFIGURATIONS = (
    ("decode_tok_s.mean", "Generation (TG), output tok/s"),
    ("prefill_tok_s.mean", "Prefill (PP), input tok/s"),
    ("start_to_first_token_s", "Start to first token, s"),
)


@dataclass(frozen=True)
class Placed:
    """A series with its place in the data, and its colour on every chart."""

    pointer: str
    series: Series
    style: int
    is_document: bool


def placed_series(view: View) -> list[Placed]:
    """All series, runs first."""
    places: list[Placed] = []
    for pointer, measured in view.data.measured:
        for index, series in enumerate(measured.series):
            at = step(f"{pointer}/series", index)
            is_document = isinstance(measured, Reference)
            places.append(Placed(at, series, len(places), is_document))
    return places


def charts(view: View) -> Markup:
    """Groups of one workload each: tokens a second of two workloads are not comparable."""
    groups: dict[str, list[Placed]] = {}
    for place in placed_series(view):
        groups.setdefault(_group(place.series), []).append(place)
    parts = [
        join(element("h3", title), _drawn(_group_charts(view, n, places)))
        for n, (title, places) in enumerate(groups.items())
    ]
    return join(*parts)


def _drawn(figures: Sequence[Markup]) -> Markup:
    if not figures:
        return element("p", "Fewer than two loads were measured: the table has them.")
    return element("div", *figures, class_="two")


def _group(series: Series) -> str:
    if series.lengths is None:
        return series.workload
    return f"{series.lengths.input:,.0f} input, {series.lengths.output:,.0f} output tokens"


def _group_charts(view: View, number: int, places: Sequence[Placed]) -> list[Markup]:
    """Sweeps by their loads, then configurations."""
    by_load: dict[Load | None, list[Placed]] = {}
    for place in places:
        by_load.setdefault(load_of(place.series), []).append(place)
    figures: list[Markup | None] = []
    for load, sweeps in by_load.items():
        if load is not None:
            figures += _sweep_charts(view, f"g{number}{load.field[0]}", load, sweeps)
    for i, place in enumerate(by_load.get(None, [])):
        for j, (name, title) in enumerate(_CONFIGURATIONS):
            figures.append(_configurations(view, f"g{number}b{i}{j}", place, name, title))
    return [figure for figure in figures if figure is not None]


def _sweep_charts(
    view: View, key: str, load: Load, sweeps: Sequence[Placed]
) -> list[Markup | None]:
    output, total = Axis("Output tok/s"), Axis("Total tok/s (in + out)")
    # waiting grows by orders of magnitude once a server is full
    ttft, tpot = Axis("TTFT mean, ms", "log"), Axis("TPOT mean, ms")
    return [
        *(_own_throughput(view, f"{key}s{i}", load, p) for i, p in enumerate(sweeps)),
        _compared(view, f"{key}o", "Output throughput", output, "output_tok_s", load, sweeps),
        _compared(view, f"{key}a", "Total throughput", total, "total_tok_s", load, sweeps),
        _compared(view, f"{key}t", "Time to first token", ttft, "ttft_ms.mean", load, sweeps),
        _compared(view, f"{key}p", "Time per output token", tpot, "tpot_ms.mean", load, sweeps),
        _pareto(view, f"{key}f", load, sweeps),
    ]


def _figure(
    title: str, text: str, chart: Markup, legend: Sequence[Markup], data: Markup | None
) -> Markup:
    caption = element("figcaption", element("h4", title), element("p", text) if text else None)
    keys = element("ul", *legend, class_="legend") if legend else None
    values = None
    if data is not None:
        values = element("details", element("summary", "Values"), data, class_="chart-data")
    return element("figure", caption, chart, keys, values)


def _legend(lines: Sequence[Line]) -> list[Markup]:
    return [
        element("li", swatch(line.style, line.is_dashed), line.name, data_for=line.name)
        for line in lines
    ]


def _signs(lines: Sequence[Line]) -> str:
    """What dashes and hollow signs mean, where there are any."""
    texts = []
    if any(line.is_dashed for line in lines):
        texts.append("Dashed: as a document states it.")
    if any(point.is_doubtful for line in lines for point in line.points):
        texts.append("Hollow: with a mark, see the tables.")
    return " ".join(texts)


def _points(place: Placed, name: str, unit: str, load: Load) -> tuple[Point, ...]:
    decimals = digits(place.series, name, is_exact=place.is_document)
    return tuple(
        Point(
            x=load.of(cell) or 0.0,
            y=measure.mean,
            about=f"{place.series.name}, {load.text(cell)} {load.point}:"
            f" {shown(measure.mean, decimals)} {unit}",
            low=None if measure.low is None else max(0.0, measure.low),
            high=measure.high,
            is_doubtful=bool(cell.notes),
        )
        for cell in place.series.cells
        if (measure := cell.numbers.get(name)) is not None
    )


def _own_throughput(view: View, key: str, load: Load, place: Placed) -> Markup | None:
    """Output, total and peak of one series: they differ by a factor, and are often mixed up."""
    kinds = (
        ("output_tok_s", "Output"),
        ("total_tok_s", "Total (in + out)"),
        ("peak_output_tok_s", "Peak output over 1 s"),
    )
    named = [(name, title, _points(place, name, "tok/s", load)) for name, title in kinds]
    lines = [Line(t, p, i) for i, (_, t, p) in enumerate(named) if p]
    if not lines or len(lines[0].points) < 2:
        return None
    title = f"{place.series.name}: throughput vs {load.title.lower()}"
    axis = Axis(load.axis, "stepped")
    chart = line_chart(key, title, axis, Axis("Tokens per second"), lines)
    metrics = [(name, title) for name, title, points in named if points]
    data = _values(view, title, [(place, name, t) for name, t in metrics])
    return _figure(title, _signs(lines), chart, _legend(lines), data)


def _compared(
    view: View,
    key: str,
    title: str,
    axis: Axis,
    name: str,
    load: Load,
    places: Sequence[Placed],
) -> Markup | None:
    """One metric of all series of a group."""
    unit = "ms" if name.endswith("ms.mean") else "tok/s"
    named = [(place, _points(place, name, unit, load)) for place in places]
    lines = [
        Line(place.series.name, points, place.style, place.is_document)
        for place, points in named
        if points
    ]
    # a single series is already drawn by itself, but for its latency
    if not lines or (len(lines) == 1 and (unit == "tok/s" or len(lines[0].points) < 2)):
        return None
    chart = line_chart(key, title, Axis(load.axis, "stepped"), axis, lines)
    data = _values(view, title, [(p, name, p.series.name) for p, points in named if points])
    caption = f"{title} vs {load.title.lower()}"
    return _figure(caption, _signs(lines), chart, _legend(lines), data)


def _pareto(view: View, key: str, load: Load, places: Sequence[Placed]) -> Markup | None:
    """What a user gets against what the box gives; up and to the right is better."""
    lines = [
        Line(place.series.name, points, place.style, place.is_document)
        for place in places
        if (points := _user_and_box(place, load))
    ]
    if sum(len(line.points) for line in lines) < 2:
        return None
    title = "Speed for a user against speed of the box"
    axes = Axis("Output tok/s for one user (1 / TPOT)"), Axis("Output tok/s of the box")
    chart = line_chart(key, title, *axes, lines)
    both = (("user_tok_s", "user"), ("output_tok_s", "box"))
    columns = [(p, name, f"{p.series.name}: {t}") for p in places for name, t in both]
    text = f"Labels: {load.axis.lower()}. Up and to the right is better."
    return _figure(title, text, chart, _legend(lines), _values(view, title, columns))


def _user_and_box(place: Placed, load: Load) -> tuple[Point, ...]:
    return tuple(
        Point(
            x=user,
            y=box,
            about=f"{place.series.name}, {load.text(cell)} {load.point}: {user:,.1f} tok/s for a"
            f" user, {box:,.0f} tok/s of the box",
            label=load.text(cell),
            is_doubtful=bool(cell.notes),
        )
        for cell in place.series.cells
        if (user := cell.mean("user_tok_s")) and (box := cell.mean("output_tok_s"))
    )


def _configurations(view: View, key: str, place: Placed, name: str, title: str) -> Markup | None:
    decimals = digits(place.series, name, is_exact=place.is_document)
    known = [cell for cell in place.series.cells if name in cell.numbers]
    if not known:
        return None
    bars = [
        Bar(cell.name, (_bar_part(cell, name, title, decimals, place.style % 6),)) for cell in known
    ]
    caption = f"{place.series.name}: {title}"
    chart = bar_chart(key, caption, title, bars)
    return _figure(caption, "", chart, [], _values(view, caption, [(place, name, title)]))


def _bar_part(cell: Cell, name: str, title: str, decimals: int, style: int) -> Part:
    value = cell.mean(name) or 0.0
    return Part(title, value, shown(value, decimals), style)


def _values(view: View, title: str, wanted: Sequence[tuple[Placed, str, str]]) -> Markup:
    """The table of a chart: a row for each load, a column for each line."""
    load = load_of(wanted[0][0].series)
    cells: dict[tuple[float, str], Cell] = {}
    for cell in (cell for place, _, _ in wanted for cell in place.series.cells):
        cells.setdefault(_key(load, cell), cell)
    rows = [
        Row(
            [
                load.text(cells[key]) if load else cells[key].name,
                *(_at(view, place, name, load, key) for place, name, _ in wanted),
            ]
        )
        for key in (sorted(cells) if load else cells)
    ]
    head = Column(load.title, is_number=True) if load else Column("Cell")
    return table(title, [head, *(Column(name, is_number=True) for _, _, name in wanted)], rows)


def _key(load: Load | None, cell: Cell) -> tuple[float, str]:
    """What tells a cell from others: its load, or its name."""
    return (load.of(cell) or 0.0, "") if load else (0.0, cell.name)


def _at(
    view: View, place: Placed, name: str, load: Load | None, key: tuple[float, str]
) -> Markup | str:
    decimals = digits(place.series, name, is_exact=place.is_document)
    for index, cell in enumerate(place.series.cells):
        if _key(load, cell) == key and name in cell.numbers:
            at = step(f"{place.pointer}/cells/{index}/numbers", name)
            return view.show(f"{at}/mean", decimals)
    return "–"


_MEMORY_PARTS = (
    *(("weights", "Weights", 0), ("kv", "KV cache", 2), ("used", "Used", 5)),
    *(("other", "Other", 3), ("free", "Free", 6)),
)


def memory_chart(view: View, key: str, pointer: str, measured: Measured) -> Markup:
    """How the memory of each card is split."""
    unit = measured.memory[0].unit
    bars = [Bar(memory.name, _memory_parts(memory)) for memory in measured.memory]
    title = "Memory per GPU"
    chart = bar_chart(key, title, unit, bars)
    seen = {part.name for bar in bars for part in bar.parts}
    legend = [element("li", _box(style), name) for _, name, style in _MEMORY_PARTS if name in seen]
    text = "Other is the rest of the card: the engine's buffers, the driver, rounding." * (
        "Other" in seen
    )
    return join(_figure(title, text, chart, legend, None), _memory_table(view, pointer, measured))


def _memory_parts(memory: Memory) -> tuple[Part, ...]:
    parts = []
    for name, title, style in _MEMORY_PARTS:
        value = getattr(memory, name)
        if name == "free" and value is None and memory.total and memory.used:
            value = memory.total - memory.used
        if value:
            parts.append(Part(title, value, f"{value:,.2f}".rstrip("0").rstrip("."), style))
    return tuple(parts)


def _box(style: int) -> Markup:
    box = element("rect", width=14, height=12)
    return element("svg", box, viewBox="0 0 14 12", aria_hidden="true", class_=f"box c{style}")


def _memory_table(view: View, pointer: str, measured: Measured) -> Markup:
    fields = (
        *(("total", "Total", 2), ("weights", "Weights", 2), ("kv", "KV cache", 2)),
        *(("used", "Used", 2), ("free", "Free", 2), ("kv_tokens", "KV tokens", 0)),
    )
    known = [f for f in fields if any(getattr(m, f[0]) is not None for m in measured.memory)]
    unit = measured.memory[0].unit
    columns = [Column("Card")] + [
        Column(title if name == "kv_tokens" else f"{title} {unit}", is_number=True)
        for name, title, _ in known
    ]
    rows = [
        Row(
            [
                view.show(f"{pointer}/memory/{i}/name"),
                *(_amount(view, f"{pointer}/memory/{i}", m, name, d) for name, _, d in known),
            ]
        )
        for i, m in enumerate(measured.memory)
    ]
    return table("Memory per GPU", columns, rows)


def _amount(view: View, at: str, memory: Memory, name: str, decimals: int) -> Markup | str:
    return "–" if getattr(memory, name) is None else view.show(f"{at}/{name}", decimals)
