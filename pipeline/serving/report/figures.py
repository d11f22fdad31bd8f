"""Charts of a report: what is drawn against what, with its legend and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.serving.report.cells import Load, digits, load_of
from pipeline.serving.report.chart import (
    Axis,
    Bar,
    Line,
    Part,
    Point,
    bar_chart,
    line_chart,
    swatch,
)
from pipeline.serving.report.markup import Child, Column, Markup, element, join, table
from pipeline.serving.report.model import (
    Cell,
    Measured,
    Memory,
    Reference,
    ReportData,
    Series,
    shown,
)

# What is drawn of a series whose cells are no loads.
_CONFIGURATIONS = (
    ("decode_tok_s.mean", "Generation (TG), output tok/s"),
    ("prefill_tok_s.mean", "Prefill (PP), input tok/s"),
    ("start_to_first_token_s", "Start to first token, s"),
)


@dataclass(frozen=True)
class Placed:
    """A series with its colour on every chart."""

    series: Series
    style: int
    is_document: bool

    def digits(self, name: str) -> int:
        """Digits after the point of one of its metrics."""
        return digits(self.series, name, is_exact=self.is_document)

    def line(self, points: tuple[Point, ...]) -> Line:
        """A line of its colour."""
        return Line(self.series.name, points, self.style, self.is_document)


def charts(data: ReportData) -> Markup:
    """Groups of one workload each: tokens a second of two workloads are not comparable."""
    groups: dict[str, list[Placed]] = {}
    style = 0
    for measured in data.measured:
        for series in measured.series:
            title, lengths = series.workload, series.lengths
            if lengths:
                title = f"{lengths.input:,.0f} input, {lengths.output:,.0f} output tokens"
            # one colour for a series on all charts of a page
            place = Placed(series, style, isinstance(measured, Reference))
            groups.setdefault(title, []).append(place)
            style += 1
    parts = []
    for number, (title, places) in enumerate(groups.items()):
        drawn = element("p", "Fewer than two loads were measured: the table has them.")
        if figures := _group_charts(number, places):
            drawn = element("div", *figures, class_="two")
        parts.append(join(element("h3", title), drawn))
    return join(*parts)


def _group_charts(number: int, places: Sequence[Placed]) -> list[Markup]:
    """Sweeps by their loads, then configurations."""
    by_load: dict[Load | None, list[Placed]] = {}
    for place in places:
        by_load.setdefault(load_of(place.series), []).append(place)
    figures: list[Markup | None] = []
    for load, sweeps in by_load.items():
        if load is None:
            continue
        key = f"g{number}{load.field[0]}"
        # waiting grows by orders of magnitude once a server is full
        compared = (
            ("o", "Output throughput", Axis("Output tok/s"), "output_tok_s"),
            ("a", "Total throughput", Axis("Total tok/s (in + out)"), "total_tok_s"),
            ("t", "Time to first token", Axis("TTFT mean, ms", "log"), "ttft_ms.mean"),
            ("p", "Time per output token", Axis("TPOT mean, ms"), "tpot_ms.mean"),
        )
        figures += [_own_throughput(f"{key}s{i}", load, each) for i, each in enumerate(sweeps)]
        figures += [
            _compared(key + letter, title, axis, name, load, sweeps)
            for letter, title, axis, name in compared
        ]
        figures.append(_pareto(f"{key}f", load, sweeps))
    for i, place in enumerate(by_load.get(None, [])):
        for j, (name, title) in enumerate(_CONFIGURATIONS):
            figures.append(_configurations(f"g{number}b{i}{j}", place, name, title))
    return [figure for figure in figures if figure is not None]


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
    decimals = place.digits(name)
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


def _own_throughput(key: str, load: Load, place: Placed) -> Markup | None:
    """Output, total and peak of one series: they differ by a factor, and are often mixed up."""
    kinds = (
        ("output_tok_s", "Output"),
        ("total_tok_s", "Total (in + out)"),
        ("peak_output_tok_s", "Peak output over 1 s"),
    )
    named = [(name, title, _points(place, name, "tok/s", load)) for name, title in kinds]
    lines = [Line(title, points, i) for i, (_, title, points) in enumerate(named) if points]
    if not lines or len(lines[0].points) < 2:
        return None
    title = f"{place.series.name}: throughput vs {load.title.lower()}"
    axes = Axis(load.axis, "stepped"), Axis("Tokens per second")
    data = _values(title, [(place, name, t) for name, t, points in named if points])
    chart = line_chart(key, title, *axes, lines)
    return _figure(title, _signs(lines), chart, _legend(lines), data)


def _compared(
    key: str, title: str, axis: Axis, name: str, load: Load, places: Sequence[Placed]
) -> Markup | None:
    """One metric of all series of a group."""
    unit = "ms" if name.endswith("ms.mean") else "tok/s"
    named = [(p, points) for p in places if (points := _points(p, name, unit, load))]
    lines = [place.line(points) for place, points in named]
    # a single series is already drawn by itself, but for its latency
    if not lines or (len(lines) == 1 and (unit == "tok/s" or len(lines[0].points) < 2)):
        return None
    chart = line_chart(key, title, Axis(load.axis, "stepped"), axis, lines)
    data = _values(title, [(place, name, place.series.name) for place, _ in named])
    caption = f"{title} vs {load.title.lower()}"
    return _figure(caption, _signs(lines), chart, _legend(lines), data)


def _pareto(key: str, load: Load, places: Sequence[Placed]) -> Markup | None:
    """What a user gets against what the machine gives; up and to the right is better."""
    lines: list[Line] = []
    for place in places:
        points = tuple(
            Point(
                x=user,
                y=output,
                about=f"{place.series.name}, {load.text(cell)} {load.point}: {user:,.1f} tok/s for"
                f" a user, {output:,.0f} tok/s of the box",
                label=load.text(cell),
                is_doubtful=bool(cell.notes),
            )
            for cell in place.series.cells
            if (user := cell.mean("user_tok_s")) and (output := cell.mean("output_tok_s"))
        )
        lines += [place.line(points)] if points else []
    if sum(len(line.points) for line in lines) < 2:
        return None
    title = "Speed for a user against speed of the box"
    axes = Axis("Output tok/s for one user (1 / TPOT)"), Axis("Output tok/s of the box")
    both = (("user_tok_s", "user"), ("output_tok_s", "box"))
    columns = [(p, name, f"{p.series.name}: {t}") for p in places for name, t in both]
    text = f"Labels: {load.axis.lower()}. Up and to the right is better."
    chart = line_chart(key, title, *axes, lines)
    return _figure(title, text, chart, _legend(lines), _values(title, columns))


def _configurations(key: str, place: Placed, name: str, title: str) -> Markup | None:
    decimals, bars = place.digits(name), []
    for cell in place.series.cells:
        if (value := cell.mean(name)) is not None:
            part = Part(title, value, shown(value, decimals), place.style % 6)
            bars.append(Bar(cell.name, (part,)))
    caption = f"{place.series.name}: {title}"
    data = _values(caption, [(place, name, title)])
    return _figure(caption, "", bar_chart(key, caption, title, bars), [], data) if bars else None


def _values(title: str, wanted: Sequence[tuple[Placed, str, str]]) -> Markup:
    """The table of a chart: a row for each load, a column for each line."""
    load = load_of(wanted[0][0].series)

    def key(cell: Cell) -> tuple[float, str]:
        """What tells a cell from others: its load, or its name."""
        return (load.of(cell) or 0.0, "") if load else (0.0, cell.name)

    heads: dict[tuple[float, str], str] = {}
    columns: list[dict[tuple[float, str], str]] = []
    for place, name, _ in wanted:
        values: dict[tuple[float, str], str] = {}
        for cell in place.series.cells:
            heads.setdefault(key(cell), load.text(cell) if load else cell.name)
            if name in cell.numbers:
                values.setdefault(key(cell), shown(cell.mean(name), place.digits(name)))
        columns.append(values)
    keys = sorted(heads) if load else list(heads)
    rows = [[heads[each], *(values.get(each, "–") for values in columns)] for each in keys]
    head = Column(load.title, is_number=True) if load else Column("Cell")
    return table(title, [head, *(Column(name, is_number=True) for _, _, name in wanted)], rows)


# Field, title and colour; the colours are those of the lines.
_MEMORY_PARTS = (
    *(("weights", "Weights", 0), ("kv", "KV cache", 2), ("used", "Used", 5)),
    *(("other", "Other", 3), ("free", "Free", 6)),
)


def memory_chart(key: str, measured: Measured) -> Markup:
    """How the memory of each card is split, as a chart and as a table."""
    unit, title = measured.memory[0].unit, "Memory per GPU"
    bars = [Bar(memory.name, _memory_parts(memory)) for memory in measured.memory]
    seen = {part.name for bar in bars for part in bar.parts}
    legend = []
    for _, name, style in _MEMORY_PARTS:
        if name in seen:
            square = element("rect", width=14, height=12)
            look = {"viewBox": "0 0 14 12", "aria_hidden": "true", "class_": f"box c{style}"}
            legend.append(element("li", element("svg", square, **look), name))
    other = "Other is the rest of the card: the engine's buffers, the driver, rounding."
    text = other if "Other" in seen else ""
    fields = (
        *(("total", f"Total {unit}", 2), ("weights", f"Weights {unit}", 2)),
        *(("kv", f"KV cache {unit}", 2), ("used", f"Used {unit}", 2)),
        *(("free", f"Free {unit}", 2), ("kv_tokens", "KV tokens", 0)),
    )
    known = [f for f in fields if any(getattr(m, f[0]) is not None for m in measured.memory)]
    columns = [Column("Card"), *(Column(each, is_number=True) for _, each, _ in known)]
    rows: list[list[Child]] = [
        [memory.name, *(shown(getattr(memory, name), d) for name, _, d in known)]
        for memory in measured.memory
    ]
    figure = _figure(title, text, bar_chart(key, title, unit, bars), legend, None)
    return join(figure, table(title, columns, rows))


def _memory_parts(memory: Memory) -> tuple[Part, ...]:
    parts = []
    for name, title, style in _MEMORY_PARTS:
        value = getattr(memory, name)
        # of a run only the used memory is sampled
        if name == "free" and value is None and memory.total and memory.used:
            value = memory.total - memory.used
        if value:
            parts.append(Part(title, value, f"{value:,.2f}".rstrip("0").rstrip("."), style))
    return tuple(parts)
