"""Charts of a report: what is drawn against what, with its legend and its table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.serving.report import chart
from pipeline.serving.report.cells import ReportLoad, digits, load_of
from pipeline.serving.report.chart import Axis, BarPart, ChartBar, Line, Point
from pipeline.serving.report.markup import Child, Column, Markup, element, html_table, join
from pipeline.serving.report.model import (
    Measured,
    PublishedReference,
    ReportCell,
    ReportData,
    Series,
    shown_value,
)

# Output, total and peak of one series differ by a factor, and are often mixed up.
_THROUGHPUT = (
    ("output_tok_s", "Output"),
    ("total_tok_s", "Total (in + out)"),
    ("peak_output_tok_s", "Peak output over 1 s"),
)
# What charts show of all series of a group. Waiting grows by orders of magnitude once a server is
# full, so its axis is logarithmic.
_COMPARED = (
    ("o", "Output throughput", Axis("Output tok/s"), "output_tok_s"),
    ("a", "Total throughput", Axis("Total tok/s (in + out)"), "total_tok_s"),
    ("t", "Time to first token", Axis("TTFT mean, ms", "log"), "ttft_ms.mean"),
    ("p", "Time per output token", Axis("TPOT mean, ms"), "tpot_ms.mean"),
)
# What charts show of a series whose cells are no loads.
_CONFIGURATIONS = (
    ("decode_tok_s.mean", "Generation (TG), output tok/s"),
    ("prefill_tok_s.mean", "Prefill (PP), input tok/s"),
    ("start_to_first_token_s", "Start to first token, s"),
)


class Placed(NamedTuple):
    """A series with its colour on every chart."""

    series: Series
    style: int
    is_document: bool

    def digits(self, name: str) -> int:
        """Digits after the point of one of its metrics."""
        return digits(self.series, name, is_exact=self.is_document)

    def points(self, name: str, unit: str, load: ReportLoad) -> tuple[Point, ...]:
        """The values of one of its metrics."""
        decimals = self.digits(name)
        return tuple(
            Point(
                x=load.of(cell) or 0.0,
                y=measure.mean,
                about=f"{self.series.name}, {load.text(cell)} {load.point}:"
                f" {shown_value(measure.mean, decimals)} {unit}",
                low=None if measure.low is None else max(0.0, measure.low),
                high=measure.high,
                is_doubtful=bool(cell.notes),
            )
            for cell in self.series.cells
            if (measure := cell.numbers.get(name)) is not None
        )


def charts(data: ReportData) -> Markup:
    """Draws a group for each workload: tokens a second of two workloads are not comparable."""
    groups: dict[str, list[Placed]] = {}
    every = [(measured, series) for measured in data.measured for series in measured.series]
    # one colour for a series on all charts of a page
    for style, (measured, series) in enumerate(every):
        title, lengths = series.workload, series.lengths
        if lengths:
            title = f"{lengths.input:,.0f} input, {lengths.output:,.0f} output tokens"
        place = Placed(series, style, isinstance(measured, PublishedReference))
        groups.setdefault(title, []).append(place)
    parts = []
    for number, (title, places) in enumerate(groups.items()):
        by_load: dict[ReportLoad | None, list[Placed]] = {}
        for place in places:
            by_load.setdefault(load_of(place.series), []).append(place)
        # sweeps by their loads, then configurations
        figures: list[Markup] = []
        for load, sweeps in by_load.items():
            figures += _sweeps(f"g{number}{load.field[0]}", load, sweeps) if load else []
        for i, place in enumerate(by_load.get(None, [])):
            for j, (name, text) in enumerate(_CONFIGURATIONS):
                bars = [
                    ChartBar(cell.name, (BarPart(text, value, printed, place.style % 6),))
                    for cell in place.series.cells
                    if (value := cell.mean(name)) is not None
                    and (printed := shown_value(value, place.digits(name)))
                ]
                if bars:
                    caption = f"{place.series.name}: {text}"
                    drawn = chart.bar_chart(f"g{number}b{i}{j}", caption, text, bars)
                    values = _values(caption, [(place, name, text)])
                    figures.append(_figure(caption, "", drawn, [], values))
        drawn = element("p", "Fewer than two loads were measured: the table has them.")
        if figures:
            drawn = element("div", *figures, class_="two")
        parts.append(join(element("h3", title), drawn))
    return join(*parts)


def _sweeps(key: str, load: ReportLoad, places: Sequence[Placed]) -> Iterator[Markup]:
    """Draws each series by itself, then all of them in one chart for each metric."""
    by = f"vs {load.title.lower()}"
    axis = Axis(load.axis, "stepped")
    for i, place in enumerate(places):
        named = [(name, t, place.points(name, "tok/s", load)) for name, t in _THROUGHPUT]
        lines = [Line(t, points, i) for i, (_, t, points) in enumerate(named) if points]
        if lines and len(lines[0].points) > 1:
            title = f"{place.series.name}: throughput {by}"
            values = _values(title, [(place, name, t) for name, t, points in named if points])
            drawn = chart.line_chart(f"{key}s{i}", title, axis, Axis("Tokens per second"), lines)
            yield _figure(title, _signs(lines), drawn, _legend(lines), values)
    for letter, title, y, name in _COMPARED:
        unit = "ms" if name.endswith("ms.mean") else "tok/s"
        known = [p for p in places if any(name in cell.numbers for cell in p.series.cells)]
        lines = [
            Line(p.series.name, p.points(name, unit, load), p.style, p.is_document) for p in known
        ]
        # a single series is already drawn by itself, but for its latency
        if len(lines) > 1 or (lines and unit == "ms" and len(lines[0].points) > 1):
            drawn = chart.line_chart(key + letter, title, axis, y, lines)
            values = _values(title, [(place, name, place.series.name) for place in known])
            yield _figure(f"{title} {by}", _signs(lines), drawn, _legend(lines), values)
    # what a user gets against what the machine gives: neither alone says what a load is worth
    lines = []
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
        lines += [Line(place.series.name, points, place.style, place.is_document)] if points else []
    if sum(len(line.points) for line in lines) > 1:
        title = "Speed for a user against speed of the box"
        axes = Axis("Output tok/s for one user (1 / TPOT)"), Axis("Output tok/s of the box")
        both = (("user_tok_s", "user"), ("output_tok_s", "box"))
        columns = [(p, name, f"{p.series.name}: {t}") for p in places for name, t in both]
        text = f"Labels: {load.axis.lower()}. Up and to the right is better."
        drawn = chart.line_chart(f"{key}f", title, *axes, lines)
        yield _figure(title, text, drawn, _legend(lines), _values(title, columns))


def _figure(
    title: str, text: str, drawn: Markup, legend: Sequence[Markup], data: Markup | None
) -> Markup:
    caption = element("figcaption", element("h4", title), element("p", text) if text else None)
    keys = element("ul", *legend, class_="legend") if legend else None
    values = None
    if data is not None:
        values = element("details", element("summary", "Values"), data, class_="chart-data")
    return element("figure", caption, drawn, keys, values)


def _legend(lines: Sequence[Line]) -> list[Markup]:
    return [element("li", line.swatch(), line.name, data_for=line.name) for line in lines]


def _signs(lines: Sequence[Line]) -> str:
    """What dashes and hollow signs mean, where there are any."""
    texts = []
    if any(line.is_dashed for line in lines):
        texts.append("Dashed: as a document states it.")
    if any(point.is_doubtful for line in lines for point in line.points):
        texts.append("Hollow: with a mark, see the tables.")
    return " ".join(texts)


def _values(title: str, wanted: Sequence[tuple[Placed, str, str]]) -> Markup:
    """The table of a chart: a row for each load, a column for each line."""
    load = load_of(wanted[0][0].series)

    def key(cell: ReportCell) -> tuple[float, str]:
        """What tells a cell from others: its load, or its name."""
        return (load.of(cell) or 0.0, "") if load else (0.0, cell.name)

    heads: dict[tuple[float, str], str] = {}
    columns: list[dict[tuple[float, str], str]] = []
    for place, name, _ in wanted:
        values: dict[tuple[float, str], str] = {}
        for cell in place.series.cells:
            heads.setdefault(key(cell), load.text(cell) if load else cell.name)
            if name in cell.numbers:
                values.setdefault(key(cell), shown_value(cell.mean(name), place.digits(name)))
        columns.append(values)
    # configurations keep the order of their document
    keys = sorted(heads) if load else list(heads)
    rows = [[heads[each], *(values.get(each, "–") for values in columns)] for each in keys]
    head = Column(load.title, is_number=True) if load else Column("Cell")
    return html_table(title, [head, *(Column(name, is_number=True) for _, _, name in wanted)], rows)


# Field, title and colour; the colours are those of the lines.
_MEMORY_PARTS = (
    *(("weights", "Weights", 0), ("kv", "KV cache", 2), ("used", "Used", 5)),
    *(("other", "Other", 3), ("free", "Free", 6)),
)


def memory_chart(key: str, measured: Measured) -> Markup:
    """How the memory of each card is split, as a chart and as a table."""
    unit, title, bars = measured.memory[0].unit, "Memory per GPU", []
    for memory in measured.memory:
        sizes = {name: getattr(memory, name) for name, _, _ in _MEMORY_PARTS}
        # of a run only the used memory is sampled
        if memory.free is None and memory.total and memory.used:
            sizes["free"] = memory.total - memory.used
        texts = {n: f"{v:,.2f}".rstrip("0").rstrip(".") for n, v in sizes.items() if v}
        known = [each for each in _MEMORY_PARTS if each[0] in texts]
        parts = [BarPart(text, sizes[name], texts[name], style) for name, text, style in known]
        bars.append(ChartBar(memory.name, tuple(parts)))
    seen = {part.name for bar in bars for part in bar.parts}
    legend = []
    for _, name, style in _MEMORY_PARTS:
        if name in seen:
            square = element("rect", width=14, height=12)
            look = {"viewBox": "0 0 14 12", "aria_hidden": "true", "class_": f"box c{style}"}
            legend.append(element("li", element("svg", square, **look), name))
    other = "Other is the rest of the card: the engine's buffers, the driver, rounding."
    fields = (
        *(("total", f"Total {unit}", 2), ("weights", f"Weights {unit}", 2)),
        *(("kv", f"KV cache {unit}", 2), ("used", f"Used {unit}", 2)),
        *(("free", f"Free {unit}", 2), ("kv_tokens", "KV tokens", 0)),
    )
    shows = [f for f in fields if any(getattr(m, f[0]) is not None for m in measured.memory)]
    columns = [Column("Card"), *(Column(each, is_number=True) for _, each, _ in shows)]
    rows: list[list[Child]] = [
        [memory.name, *(shown_value(getattr(memory, name), d) for name, _, d in shows)]
        for memory in measured.memory
    ]
    drawn = chart.bar_chart(key, title, unit, bars)
    figure = _figure(title, other if "Other" in seen else "", drawn, legend, None)
    return join(figure, html_table(title, columns, rows))
