"""Tables of measured numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.report.markup import Markup, element, join
from pipeline.report.model import Cell, Reference, Series
from pipeline.report.pointer import step
from pipeline.report.view import Column, Row, View, table, tag


class Metric(NamedTuple):
    """A column of the tables; throughput always says of what."""

    name: str
    title: str
    has_interval: bool = False


THROUGHPUT = (
    Metric("output_tok_s", "Output tok/s", has_interval=True),
    Metric("total_tok_s", "Total tok/s (in + out)"),
    Metric("peak_output_tok_s", "Peak output tok/s (1 s)"),
    Metric("user_tok_s", "Output tok/s per user"),
    Metric("requests_s", "Requests/s"),
    Metric("goodput_s", "Goodput requests/s"),
    Metric("decode_tok_s.mean", "Generation (TG) tok/s"),
    Metric("prefill_tok_s.mean", "Prefill (PP) tok/s"),
    Metric("acceptance_length", "Acceptance length"),
    Metric("joules_per_output_token", "J per output token"),
    Metric("failed", "Failed requests"),
    Metric("ready_s", "Ready after s"),
    Metric("start_to_first_token_s", "First token after s"),
)
LATENCY = (
    Metric("ttft_ms.mean", "TTFT mean ms", has_interval=True),
    Metric("ttft_ms.p50", "TTFT p50 ms"),
    Metric("ttft_ms.p90", "TTFT p90 ms"),
    Metric("ttft_ms.p99", "TTFT p99 ms"),
    Metric("tpot_ms.mean", "TPOT mean ms", has_interval=True),
    Metric("tpot_ms.p50", "TPOT p50 ms"),
    Metric("tpot_ms.p99", "TPOT p99 ms"),
    Metric("itl_ms.mean", "ITL mean ms"),
    Metric("itl_ms.p99", "ITL p99 ms"),
    Metric("latency_ms.mean", "Latency mean ms"),
    Metric("latency_ms.p99", "Latency p99 ms"),
)
# More columns than this do not fit on a printed page.
_MOST_COLUMNS = 10


def series_tables(view: View, pointer: str, series: Series, *, is_exact: bool) -> Markup:
    """All numbers of a series; `is_exact` keeps the digits of a document."""
    throughput, latency = _known(series, THROUGHPUT), _known(series, LATENCY)
    title = f"{series.name} ({series.workload})"
    if len(throughput) + len(latency) <= _MOST_COLUMNS:
        return _table(view, pointer, series, title, [*throughput, *latency], is_exact)
    return join(
        _table(view, pointer, series, f"{title}: throughput", throughput, is_exact),
        _table(view, pointer, series, f"{title}: latency", latency, is_exact),
    )


def _known(series: Series, metrics: Sequence[Metric]) -> list[Metric]:
    return [m for m in metrics if any(m.name in cell.numbers for cell in series.cells)]


def _table(
    view: View, pointer: str, series: Series, title: str, metrics: Sequence[Metric], is_exact: bool
) -> Markup:
    is_sweep = by_concurrency(series)
    has_notes = any(cell.notes or cell.state != "good" for cell in series.cells)
    columns = [
        Column("Concurrency" if is_sweep else "Cell", is_number=is_sweep),
        *(Column(metric.title, is_number=True) for metric in metrics),
        *([Column("State", is_wide=True)] if has_notes else []),
    ]
    decimals = {m.name: digits(series, m.name, is_exact=is_exact) for m in metrics}
    rows = []
    for index, cell in enumerate(series.cells):
        at = step(step(step(pointer, "cells"), index), "")[:-1]
        head = view.show(f"{at}/concurrency", 0) if is_sweep else view.show(f"{at}/name")
        values = [_value(view, at, cell, metric, decimals[metric.name]) for metric in metrics]
        notes = [_state(view, at, cell)] if has_notes else []
        rows.append(Row([head, *values, *notes], "void" if cell.state == "void" else ""))
    return table(title, columns, rows)


def _value(view: View, at: str, cell: Cell, metric: Metric, decimals: int) -> Markup | str:
    measure = cell.numbers.get(metric.name)
    if measure is None:
        return "–"
    place = step(f"{at}/numbers", metric.name)
    mean = view.show(f"{place}/mean", decimals)
    if not metric.has_interval or measure.low is None or measure.high is None:
        return mean
    low, high = view.show(f"{place}/low", decimals), view.show(f"{place}/high", decimals)
    return join(mean, element("br"), element("span", low, "–", high, class_="ci"))


def _state(view: View, at: str, cell: Cell) -> Markup:
    kind = {"good": "good", "partial": "warn", "void": "bad"}[cell.state]
    notes = [
        join(
            " ",
            tag(view.show(f"{at}/notes/{i}/kind"), "warn"),
            " ",
            view.show(f"{at}/notes/{i}/message"),
        )
        for i in range(len(cell.notes))
    ]
    return join(tag(view.show(f"{at}/state"), kind), *notes)


def by_concurrency(series: Series) -> bool:
    """Whether its cells differ by their load alone."""
    loads = [cell.concurrency for cell in series.cells]
    return None not in loads and len(set(loads)) == len(loads)


def digits(series: Series, name: str, *, is_exact: bool) -> int:
    """Digits behind the point: as many as a document has, or as a reader can use."""
    values = [value for cell in series.cells if (value := cell.mean(name)) is not None]
    if not values:
        return 0
    if is_exact and name != "user_tok_s":
        return max(len(f"{value:.2f}".rstrip("0").partition(".")[2]) for value in values)
    if all(value == int(value) for value in values):
        return 0
    smallest = min(abs(value) for value in values)
    return 0 if smallest >= 100 else 1 if smallest >= 10 else 2


def is_document(measured: object) -> bool:
    """Whether digits are to be kept as they were printed."""
    return isinstance(measured, Reference)
