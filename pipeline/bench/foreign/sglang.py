"""`sglang.bench_serving --output-file`: a line of JSON for each run.

Read in python/sglang/benchmark/serving.py of sgl-project/sglang. Its default rate is written as
`Infinity`, which is no JSON.
"""

from __future__ import annotations

from typing import Any

from pipeline.bench.foreign.model import (
    ForeignCell,
    Rule,
    cell_name,
    numbers_of,
    settings_of,
    statistic_rule,
)

_CONNECTS = "also has the time to connect: each request opens a connection of its own"
_DONE = "ends with the last line of the answer, ours with the last event that has text"
_ASKED = "takes the tokens that were asked for where the stream has no usage"
_INPUT = "counts prompt tokens with its own tokenizer"
_SHARED = "is divided by the tokens of a chunk, once for each of them"
# these read the engine's own count of tokens, and divide a gap by the tokens it brought
_NATIVE = ("sglang", "sglang-native")
_NO_SETTING = ("server_info", "tag", "max_itl_ms", "total_output_tokens_retokenized")


def is_sglang(value: Any) -> bool:
    """Whether an object is a result of `sglang.bench_serving`."""
    return (
        isinstance(value, dict)
        and "mean_e2e_latency_ms" in value
        and "total_output_tokens_retokenized" in value
    )


def read_sglang(results: list[dict[str, Any]]) -> list[ForeignCell]:
    """Cells by their concurrency or rate; lines with the same settings are repeats."""
    return [_cell(result) for result in results]


def _cell(result: dict[str, Any]) -> ForeignCell:
    rules = _rules(result)
    numbers = numbers_of(result, lambda name: rules.get(name) or _times(name, result))
    leave = {*_NO_SETTING, *(n.name for n in numbers)}
    leave |= {name for name in result if name.startswith("std_")}
    name = cell_name(result.get("max_concurrency"), result.get("request_rate"))
    return ForeignCell(name=name, settings=settings_of(result, leave), numbers=numbers)


def _rules(result: dict[str, Any]) -> dict[str, Rule]:
    output = "" if result.get("backend") in _NATIVE else _ASKED
    total = "; ".join(x for x in (output, _INPUT) if x)
    return {
        "output_throughput": Rule("output_tok_s", "tok/s", output),
        "total_throughput": Rule("total_tok_s", "tok/s", total),
        "input_throughput": Rule(None, "tok/s"),
        "request_throughput": Rule("requests_s", "1/s"),
        "max_output_tokens_per_s": Rule("peak_output_tok_s", "tok/s", "counts chunks, not tokens"),
        "max_concurrent_requests": Rule(None, ""),
        "concurrency": Rule("concurrency", ""),
        "duration": Rule("duration_s", "s"),
        "completed": Rule("completed", ""),
        "total_input_tokens": Rule("input_tokens", "tok", _INPUT),
        "total_output_tokens": Rule("output_tokens", "tok", output),
        "accept_length": Rule(
            "acceptance_length", "tok", "is the server's average since its start"
        ),
    }


def _times(name: str, result: dict[str, Any]) -> Rule | None:
    is_shared = result.get("backend") in _NATIVE or bool(result.get("accept_length"))
    like = {
        "ttft": ("ttft_ms", _CONNECTS),
        "tpot": ("tpot_ms", _DONE),
        "itl": ("itl_ms", _SHARED if is_shared else ""),
        "e2e_latency": ("latency_ms", _CONNECTS),
    }
    return statistic_rule(name, like)
