"""Tables of measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.serving.report.markup import Column, Markup, element, join, table, tag
from pipeline.serving.report.model import Cell, Series, shown


class Metric(NamedTuple):
    """A column of the tables; throughput always says of what."""

    name: str
    title: str
    has_interval: bool = False


class Load(NamedTuple):
    """How much was asked of a server at a time: the first column of tables, the axis of charts."""

    field: str
    title: str
    axis: str
    point: str  # the words after one value

    def of(self, cell: Cell) -> float | None:
        """How much it was in a cell."""
        value: float | None = getattr(cell, self.field)
        return value

    def text(self, cell: Cell) -> str:
        """The same for people."""
        value = self.of(cell)
        return shown(value, 0 if (value or 0) == int(value or 0) else 2)


# A rate may have a bound of streams as well: it is asked for first.
_CONCURRENCY = Load("concurrency", "Concurrency", "Concurrent requests", "at once")
_RATE = Load("rate_per_s", "Requests/s sent", "Requests per second, as sent", "requests/s")
# In the order of the columns; a document or a run has only some of them.
THROUGHPUT = (
    Metric("output_tok_s", "Output tok/s", has_interval=True),
    Metric("total_tok_s", "Total tok/s (in + out)"),
    Metric("peak_output_tok_s", "Peak output tok/s (1 s)"),
    Metric("user_tok_s", "Output tok/s per user"),
    Metric("decode_tok_s.mean", "Generation (TG) output tok/s"),
    Metric("prefill_tok_s.mean", "Prefill (PP) input tok/s"),
    Metric("requests_s", "Requests/s"),
    Metric("goodput_s", "Goodput requests/s"),
    Metric("acceptance_length", "Acceptance length"),
    Metric("joules_per_output_token", "J per output token"),
    Metric("failed", "Failed requests"),
    Metric("ready_s", "Ready after s"),
    Metric("start_to_first_token_s", "First token after s"),
)
FIRST_TOKEN = (
    Metric("ttft_ms.mean", "TTFT mean ms", has_interval=True),
    Metric("ttft_ms.p50", "TTFT p50 ms"),
    Metric("ttft_ms.p90", "TTFT p90 ms"),
    Metric("ttft_ms.p99", "TTFT p99 ms"),
    Metric("tpot_ms.mean", "TPOT mean ms", has_interval=True),
    Metric("tpot_ms.p50", "TPOT p50 ms"),
    Metric("tpot_ms.p90", "TPOT p90 ms"),
    Metric("tpot_ms.p99", "TPOT p99 ms"),
)
REST = (
    Metric("itl_ms.mean", "ITL mean ms"),
    Metric("itl_ms.p50", "ITL p50 ms"),
    Metric("itl_ms.p99", "ITL p99 ms"),
    Metric("latency_ms.mean", "Latency mean ms", has_interval=True),
    Metric("latency_ms.p50", "Latency p50 ms"),
    Metric("latency_ms.p99", "Latency p99 ms"),
)
METRICS = (*THROUGHPUT, *FIRST_TOKEN, *REST)
# More columns than this do not fit on a printed page.
_MOST_COLUMNS = 9


def series_tables(series: Series, *, is_exact: bool) -> Markup:
    """All numbers of a series; `is_exact` keeps the digits of a document."""
    title = f"{series.name} ({series.workload})"
    together = known_metrics(series)
    parts = [(title, together)]
    if len(together) > _MOST_COLUMNS:
        groups = (
            ("throughput", THROUGHPUT),
            ("TTFT and TPOT", FIRST_TOKEN),
            ("ITL and latency", REST),
        )
        known = [(f"{title}: {part}", known_metrics(series, each)) for part, each in groups]
        parts = [(title, metrics) for title, metrics in known if metrics]
    tables = [_table(series, title, metrics, is_exact) for title, metrics in parts]
    # cells that are void, or to be taken with care
    rows = []
    for cell in series.cells:
        if cell.notes or cell.state != "good":
            kind = {"good": "good", "partial": "warn", "void": "bad"}[cell.state]
            notes = [
                element("div", tag(n.kind, "bad" if n.kind == "void" else "warn"), " ", n.message)
                for n in cell.notes
            ]
            rows.append([_load_text(series, cell), tag(cell.state, kind), join(*notes)])
    if rows:
        columns = [_head(series), Column("State"), Column("Marks", is_wide=True)]
        tables.append(table(f"{series.name}: to be taken with care", columns, rows))
    return join(*tables)


def known_metrics(series: Series, metrics: Sequence[Metric] = METRICS) -> list[Metric]:
    """Columns that have something to say."""
    known = {name: m.mean for cell in series.cells for name, m in cell.numbers.items()}
    # 1 / TPOT of each request; its mean over requests says the same as that of TPOT
    if "user_tok_s" in known:
        known.pop("decode_tok_s.mean", None)
    if all(_is_no_peak(cell, "peak_output_tok_s") for cell in series.cells):
        known.pop("peak_output_tok_s", None)
    if not any(cell.mean("failed") for cell in series.cells):
        known.pop("failed", None)
    return [metric for metric in metrics if metric.name in known]


def _table(series: Series, title: str, metrics: Sequence[Metric], is_exact: bool) -> Markup:
    columns = [_head(series), *(Column(metric.title, is_number=True) for metric in metrics)]
    decimals = {m.name: digits(series, m.name, is_exact=is_exact) for m in metrics}
    rows = [
        [
            _load_text(series, cell),
            *(_value(cell, metric, decimals[metric.name]) for metric in metrics),
        ]
        for cell in series.cells
    ]
    styles = ["void" if cell.state == "void" else None for cell in series.cells]
    return table(title, columns, rows, styles)


def _head(series: Series) -> Column:
    load = load_of(series)
    return Column(load.title, is_number=True) if load else Column("Cell", is_wide=True)


def _load_text(series: Series, cell: Cell) -> str:
    load = load_of(series)
    return load.text(cell) if load else cell.name


def _value(cell: Cell, metric: Metric, decimals: int) -> Markup | str:
    measure = cell.numbers.get(metric.name)
    if measure is None or _is_no_peak(cell, metric.name):
        return "–"
    mean = shown(measure.mean, decimals)
    if not metric.has_interval or measure.low is None or measure.high is None:
        return mean
    # none of these numbers can be below zero, whatever an interval by Student's t says
    low, high = shown(max(0.0, measure.low), decimals), shown(measure.high, decimals)
    return join(mean, element("br"), element("span", low, "–", high, class_="ci"))


def _is_no_peak(cell: Cell, name: str) -> bool:
    """Of a trial shorter than a second, a second's tokens are fewer than its mean: no peak."""
    if name != "peak_output_tok_s":
        return False
    return (cell.mean(name) or 0.0) < (cell.mean("output_tok_s") or 0.0)


def load_of(series: Series) -> Load | None:
    """By what its cells differ; none where they are configurations with names."""
    for load in (_RATE, _CONCURRENCY):
        values = [load.of(cell) for cell in series.cells]
        if None not in values and len(set(values)) == len(values):
            return load
    return None


def digits(series: Series, name: str, *, is_exact: bool) -> int:
    """Digits after the point: as many as a document has, or as a reader can use."""
    values = [value for cell in series.cells if (value := cell.mean(name)) is not None]
    if not values:
        return 0
    # what we compute ourselves has no digits of a document
    if is_exact and name != "user_tok_s":
        return max(len(f"{value:.2f}".rstrip("0").partition(".")[2]) for value in values)
    if all(value == int(value) for value in values):
        return 0
    # three digits are more than two trials agree on
    smallest = min(abs(value) for value in values)
    return 0 if smallest >= 100 else 1 if smallest >= 10 else 2
