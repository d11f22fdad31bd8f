"""guidellm's `benchmarks.json`: a list of benchmarks, their metrics by the state of requests.

Read in src/guidellm/benchmark/schemas/generative (metrics.py, benchmark.py, report.py) and
src/guidellm/schemas (statistics.py, request_stats.py) of vllm-project/guidellm.
"""

from __future__ import annotations

from typing import Any

from pipeline.bench.foreign.model import (
    ForeignCell,
    ForeignNumber,
    Rule,
    cell_name,
    inner,
    is_number,
    number_of,
    quantile_of,
    settings_of,
    short,
)

FILE = "benchmarks.json"
_STEP = "takes the next value above a percentile, ours lies between two"
_RATE = "is a mean of rates between events, weighted by time, and not tokens by the duration"
_WEIGHTED = "weighs each request by its tokens, ours all requests alike"
_WITH_FIRST = "has the time to the first token in it"
_END = "may end before the answer's last byte"
_SPREAD = {
    "time_to_first_token_ms": Rule("ttft_ms", "ms"),
    "inter_token_latency_ms": Rule("tpot_ms", "ms", _WEIGHTED),
    "time_per_output_token_ms": Rule("tpot_ms", "ms", _WITH_FIRST),
    "request_latency": Rule("latency_ms", "ms", _END, 1e3),  # in seconds
}
_MEANS = {
    "output_tokens_per_second": Rule("output_tok_s", "tok/s", _RATE),
    "tokens_per_second": Rule("total_tok_s", "tok/s", _RATE),
    "requests_per_second": Rule("requests_s", "1/s", _RATE),
    "request_concurrency": Rule("concurrency", ""),
}


def is_guidellm(value: Any) -> bool:
    """Whether an object is guidellm's report."""
    if not isinstance(value, dict) or not isinstance(value.get("benchmarks"), list):
        return False
    return any(
        isinstance(each, dict) and "time_to_first_token_ms" in inner(each, "metrics")
        for each in value["benchmarks"]
    )


def read_guidellm(reports: list[dict[str, Any]]) -> list[ForeignCell]:
    """A cell for each benchmark of a report."""
    benchmarks = [each for report in reports for each in report["benchmarks"]]
    return [_cell(each) for each in benchmarks if isinstance(each, dict)]


def _cell(benchmark: dict[str, Any]) -> ForeignCell:
    metrics, config = inner(benchmark, "metrics"), inner(benchmark, "config")
    strategy = inner(config, "strategy")
    streams = next((strategy[k] for k in ("streams", "max_concurrency") if strategy.get(k)), None)
    kind = short(strategy.get("type_") or strategy.get("kind") or "all")
    settings = {**settings_of(inner(config, "backend")), **settings_of(strategy)}
    return ForeignCell(
        name=cell_name(streams if kind == "concurrent" else None, strategy.get("rate"), kind),
        settings=settings,
        numbers=[n for name, block in metrics.items() for n in _numbers(name, block)],
    )


def _numbers(name: str, block: Any) -> list[ForeignNumber]:
    good = inner(block, "successful")
    if name == "request_totals":
        return _counts(block)
    if name in _MEANS:
        number = number_of(name, [good.get("mean")], _MEANS[name])
        return [number] if number else []
    if name not in _SPREAD:
        return []
    rule = _SPREAD[name]
    assert rule.like is not None
    values = {"mean": good.get("mean"), **inner(good, "percentiles")}
    found = []
    for each in ("mean", "p50", "p90", "p95", "p99"):
        both = (rule.difference, "" if each == "mean" else _STEP)
        difference = "; ".join(x for x in both if x)
        like = quantile_of(rule.like, each)
        found.append(
            number_of(
                f"{name}.{each}", [values.get(each)], Rule(like, "ms", difference, rule.factor)
            )
        )
    return [number for number in found if number]


def _counts(block: Any) -> list[ForeignNumber]:
    pairs = (("successful", "completed"), ("errored", "failed"))
    return [
        ForeignNumber(name=f"request_totals.{theirs}", unit="", values=[block[theirs]], like=ours)
        for theirs, ours in pairs
        if isinstance(block, dict) and is_number(block.get(theirs))
    ]
