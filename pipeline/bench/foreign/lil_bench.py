"""lil-bench's `lil-bench-result/1`, also packed, and the JSON of its llm_decode_bench.py.

Read in lil_bench/standard.py, llm_decode_bench.py and README.md of
local-inference-lab/llm-inference-bench. Times are seconds; a negative speed is a failed cell.
"""

from __future__ import annotations

from typing import Any

from pipeline.bench.foreign.model import (
    ForeignCell,
    Rule,
    inner,
    is_number,
    numbers_of,
    quantile_of,
    settings_of,
    short,
)

SCHEMA = "lil-bench-result/"
_WINDOW = "is of a window in the middle of decoding, with every prompt in the cache before"
_LATENCY = "ends with the last content, ours with the answer's last byte"
_PREFILL = "counts all prompt tokens, ours those that were not cached"
_STATISTICS = ("avg", "p50", "p90", "p99")
_TIMES = {
    "ttft": ("ttft_ms", _WINDOW),
    "inter_token_latency": ("tpot_ms", ""),
    "chunk_inter_token_latency": ("itl_ms", "is a mean for each request, ours each gap"),
    "request_latency": ("latency_ms", _LATENCY),
}
_FLAT = {
    "aggregate_tps": Rule("output_tok_s", "tok/s", _WINDOW),
    "per_request_avg_tps": Rule("decode_tok_s.mean", "tok/s", _WINDOW),
    "num_completed": Rule("completed", ""),
    "num_errors": Rule("failed", ""),
    "server_spec_accept_length": Rule("acceptance_length", "tok"),
}
_TIMED = {
    f"{name}_{each}": Rule(quantile_of(like, each), "ms", difference, 1e3)
    for name, (like, difference) in _TIMES.items()
    for each in _STATISTICS
}


def is_lil_bench(value: Any) -> bool:
    """Whether an object is a result of lil-bench, or of the program that it runs."""
    return isinstance(value, dict) and (
        str(value.get("schema")).startswith(SCHEMA)
        or ("metadata" in value and "summary_table" in value and "results" in value)
    )


def read_lil_bench(documents: list[dict[str, Any]]) -> list[ForeignCell]:
    """A cell for each concurrency and context, and for each prefill."""
    return [cell for document in documents for cell in _cells(document)]


def _cells(document: dict[str, Any]) -> list[ForeignCell]:
    bench = document
    if "schema" in document:
        bench = inner(inner(document, "results"), "bench")
    settings = settings_of(inner(bench, "metadata"), ("timestamp",))
    rows = bench.get("results")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    cells = [_decode(row, settings) for row in rows]
    return [*cells, *_prefills(inner(bench, "prefill"), settings)]


def _decode(row: dict[str, Any], settings: dict[str, str]) -> ForeignCell:
    speed: Any = row.get("aggregate_tps")
    is_measured = is_number(speed) and speed >= 0
    # zero is what the program writes for a time that it does not know
    known = {k: v for k, v in row.items() if v} if is_measured else {}
    return ForeignCell(
        name=short(f"c{row.get('concurrency')}-in{row.get('context_tokens')}"),
        settings={**settings, **settings_of({"failure": row.get("failure_reason") or ""})},
        numbers=numbers_of(known, lambda name: _FLAT.get(name) or _TIMED.get(name)),
    )


def _prefills(prefill: dict[str, Any], settings: dict[str, str]) -> list[ForeignCell]:
    rules = {
        "tok_per_sec": Rule("prefill_tok_s.mean", "tok/s", _PREFILL),
        "ttft_seconds": Rule("ttft_ms.mean", "ms", "", 1e3),
    }
    return [
        ForeignCell(name=short(f"prefill-in{context}"), settings=settings, numbers=numbers)
        for context, row in prefill.items()
        if isinstance(row, dict) and (numbers := numbers_of(row, rules.get))
    ]
