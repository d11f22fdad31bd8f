"""Tables of measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.serving.report.markup import Column, Markup, element, html_table, join, tag
from pipeline.serving.report.model import ReportCell, Series, shown_value


class Metric(NamedTuple):
    """A column of the tables; throughput always says of what."""

    name: str
    title: str
    has_interval: bool = False


class ReportLoad(NamedTuple):
    """How much was asked of a server at a time: the first column of tables, the axis of charts."""

    field: str
    title: str
    axis: str
    point: str  # the words after one value

    def of(self, cell: ReportCell) -> float | None:
        """The load of a cell."""
        value: float | None = getattr(cell, self.field)
        return value

    def text(self, cell: ReportCell) -> str:
        """The load of a cell, for people."""
        value = self.of(cell)
        return shown_value(value, 0 if (value or 0) == int(value or 0) else 2)


# A rate may have a bound of streams as well: it is asked for first.
_CONCURRENCY = ReportLoad("concurrency", "Concurrency", "Concurrent requests", "at once")
_RATE = ReportLoad("rate_per_s", "Requests/s sent", "Requests per second, as sent", "requests/s")
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
    Metric("start_to_right_answer_s", "Right answer after s"),
    Metric("pull_s", "Pull of the image s"),
    Metric("pull_to_right_answer_s", "Right answer after the pull's begin s"),
    *(Metric(f"{part}_s", f"of it {part} s") for part in ("load", "compile", "tune", "capture")),
)
# The interval of the mean is what tells two runs apart.
FIRST_TOKEN = tuple(
    Metric(f"{kind.lower()}_ms.{part}", f"{kind} {part} ms", has_interval=part == "mean")
    for kind in ("TTFT", "TPOT")
    for part in ("mean", "p50", "p90", "p99")
)
REST = (
    *(Metric(f"itl_ms.{part}", f"ITL {part} ms") for part in ("mean", "p50", "p99")),
    Metric("latency_ms.mean", "Latency mean ms", has_interval=True),
    *(Metric(f"latency_ms.{part}", f"Latency {part} ms") for part in ("p50", "p99")),
)
METRICS = (*THROUGHPUT, *FIRST_TOKEN, *REST)
_GROUPS = (("throughput", THROUGHPUT), ("TTFT and TPOT", FIRST_TOKEN), ("ITL and latency", REST))
# More columns than this do not fit on a printed page.
_MOST_COLUMNS = 9


def series_tables(series: Series, *, is_exact: bool) -> Markup:
    """All numbers of a series; `is_exact` keeps the digits of a document."""
    title, load = f"{series.name} ({series.workload})", load_of(series)
    head = Column(load.title, is_number=True) if load else Column("Cell", is_wide=True)
    heads = [load.text(cell) if load else cell.name for cell in series.cells]
    styles = ["void" if cell.state == "void" else None for cell in series.cells]
    together = known_metrics(series)
    parts = [(title, together)]
    if len(together) > _MOST_COLUMNS:
        known = [(f"{title}: {part}", known_metrics(series, each)) for part, each in _GROUPS]
        parts = [(title, metrics) for title, metrics in known if metrics]
    tables = []
    for title, metrics in parts:
        columns = [head, *(Column(metric.title, is_number=True) for metric in metrics)]
        places = [(m, digits(series, m.name, is_exact=is_exact)) for m in metrics]
        rows = [
            [text, *(_value(cell, *place) for place in places)]
            for text, cell in zip(heads, series.cells, strict=True)
        ]
        tables.append(html_table(title, columns, rows, styles))
    # cells that are void, or to be taken with care
    doubtful = []
    for text, cell in zip(heads, series.cells, strict=True):
        if cell.notes or cell.state != "good":
            kind = {"good": "good", "partial": "warn", "void": "bad"}[cell.state]
            notes = [
                element("div", tag(n.kind, "bad" if n.kind == "void" else "warn"), " ", n.message)
                for n in cell.notes
            ]
            doubtful.append([text, tag(cell.state, kind), join(*notes)])
    if doubtful:
        columns = [head, Column("State"), Column("Marks", is_wide=True)]
        tables.append(html_table(f"{series.name}: to be taken with care", columns, doubtful))
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


def _value(cell: ReportCell, metric: Metric, decimals: int) -> Markup | str:
    measure = cell.numbers.get(metric.name)
    if measure is None or _is_no_peak(cell, metric.name):
        return "–"
    mean = shown_value(measure.mean, decimals)
    if not metric.has_interval or measure.low is None or measure.high is None:
        return mean
    # none of these numbers can be below zero, whatever an interval by Student's t says
    low, high = shown_value(max(0.0, measure.low), decimals), shown_value(measure.high, decimals)
    return join(mean, element("br"), element("span", low, "–", high, class_="ci"))


def _is_no_peak(cell: ReportCell, name: str) -> bool:
    """In a trial shorter than a second, this number is below the mean rate: no peak."""
    is_peak = name == "peak_output_tok_s"
    return is_peak and (cell.mean(name) or 0.0) < (cell.mean("output_tok_s") or 0.0)


def load_of(series: Series) -> ReportLoad | None:
    """The load by which cells differ; none if they are configurations with names."""
    # equal loads are repeats under other settings, which an axis cannot tell apart
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
