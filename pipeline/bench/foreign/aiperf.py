"""aiperf's `profile_export_aiperf.json`: for each metric an object of statistics and its unit.

Read in docs/reference/json-export-schema.md and docs/metrics-reference.md of ai-dynamo/aiperf.
"""

from __future__ import annotations

from typing import Any

from pipeline.bench.foreign.model import (
    ForeignCell,
    ForeignNumber,
    Rule,
    cell_name,
    number_of,
    quantile_of,
    settings_of,
)

FILE = "profile_export_aiperf.json"
_STATISTICS = ("avg", "p50", "p90", "p95", "p99")
_TOKENS = "counts tokens with its own tokenizer (--use-server-token-count was not given)"
_END = "ends with the last response that has content, ours with the answer's last byte"
# their units, as factors to ours
_FACTORS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}
_SINGLE = {
    "output_token_throughput": ("output_tok_s", "tok/s", _TOKENS),
    "total_token_throughput": ("total_tok_s", "tok/s", _TOKENS),
    "request_throughput": ("requests_s", "1/s", ""),
    "goodput": ("goodput_s", "1/s", ""),
    "request_count": ("completed", "", ""),
    "error_request_count": ("failed", "", ""),
    "total_isl": ("input_tokens", "tok", _TOKENS),
    "total_osl": ("output_tokens", "tok", _TOKENS),
}
_SPREAD = {
    "time_to_first_token": ("ttft_ms", ""),
    "inter_token_latency": ("tpot_ms", _TOKENS),
    "inter_chunk_latency": ("itl_ms", ""),
    "request_latency": ("latency_ms", _END),
}


def is_aiperf(value: Any) -> bool:
    """Whether an object is aiperf's summary."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), dict) and "unit" in value[name]
        for name in ("request_throughput", "request_latency")
    )


def read_aiperf(summaries: list[dict[str, Any]]) -> list[ForeignCell]:
    """A cell for each summary."""
    return [_cell(summary) for summary in summaries]


def _cell(summary: dict[str, Any]) -> ForeignCell:
    config = summary.get("input_config")
    flat = _leaves(config if isinstance(config, dict) else {})
    by_server = flat.get("endpoint.use_server_token_count") is True
    numbers = [n for name, block in summary.items() for n in _numbers(name, block, by_server)]
    name = cell_name(_last(flat, "concurrency"), _last(flat, "request_rate"))
    settings = settings_of({**settings_of(summary, ("start_time", "end_time")), **flat})
    return ForeignCell(name=name, settings=settings, numbers=numbers)


def _numbers(name: str, block: Any, by_server: bool) -> list[ForeignNumber]:
    if not isinstance(block, dict):
        return []
    if name in _SINGLE:
        like, unit, difference = _SINGLE[name]
        rule = Rule(like, unit, "" if by_server and difference == _TOKENS else difference)
        number = number_of(name, [block.get("avg")], rule)
        return [number] if number else []
    if name not in _SPREAD:
        return []
    like, difference = _SPREAD[name]
    difference = "" if by_server and difference == _TOKENS else difference
    factor = _FACTORS.get(str(block.get("unit")))
    # a unit that nobody here knows would make a number of another size
    if factor is None:
        return []
    read = []
    for each in _STATISTICS:
        rule = Rule(quantile_of(like, each), "ms", difference, factor)
        read.append(number_of(f"{name}.{each}", [block.get(each)], rule))
    return [number for number in read if number]


def _leaves(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Single values of nested settings by their path."""
    if isinstance(value, dict) and depth < 8:
        found: dict[str, Any] = {}
        for name, each in value.items():
            found |= _leaves(each, f"{path}.{name}" if path else str(name), depth + 1)
        return found
    return {path: value} if isinstance(value, str | int | float) else {}


def _last(flat: dict[str, Any], name: str) -> Any:
    """A setting by the end of its path: where it stands differs by version."""
    return next((v for path, v in flat.items() if path.split(".")[-1] == name), None)
