"""`vllm bench serve --save-result`, also appended, and the folders of `vllm bench sweep`.

Read in vllm/benchmarks/serve.py, lib/endpoint_request_func.py and sweep/serve.py of
vllm-project/vllm: a result is one flat object; a sweep keeps each as `run=N.json` and all of a
combination as a list in `summary.json`, with `run_number` and the swept parameters added.
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

_ROLE = (
    "begins with the first chunk that has a choice; over the chat API that one carries the role"
    " and no text"
)
_END = "ends with the last chunk that has a choice, ours with the answer's last byte"
_PEAK = "counts chunks and not tokens"
_FLAT = {
    "output_throughput": Rule("output_tok_s", "tok/s"),
    "total_token_throughput": Rule("total_tok_s", "tok/s"),
    "request_throughput": Rule("requests_s", "1/s"),
    "request_goodput": Rule("goodput_s", "1/s"),
    "max_output_tokens_per_s": Rule("peak_output_tok_s", "tok/s", _PEAK),
    "max_concurrent_requests": Rule(None, ""),
    "duration": Rule("duration_s", "s"),
    "completed": Rule("completed", ""),
    "failed": Rule("failed", ""),
    "total_input_tokens": Rule("input_tokens", "tok"),
    "total_output_tokens": Rule("output_tokens", "tok"),
    "spec_decode_acceptance_length": Rule("acceptance_length", "tok"),
    "spec_decode_acceptance_rate": Rule(None, "%"),
    "spec_decode_num_drafts": Rule("verifier_steps", ""),
}
_NO_SETTING = ("date", "run_number")


def is_vllm(value: Any) -> bool:
    """Whether an object is a result of `vllm bench serve`."""
    return isinstance(value, dict) and "model_id" in value and "total_token_throughput" in value


def read_vllm(results: list[dict[str, Any]]) -> list[ForeignCell]:
    """Cells by their concurrency or rate; runs with the same settings are repeats."""
    return [_cell(result) for result in results]


def _cell(result: dict[str, Any]) -> ForeignCell:
    is_chat = "chat" in str(result.get("backend") or result.get("endpoint_type"))
    numbers = numbers_of(result, lambda name: _rule(name, is_chat))
    leave = {*_NO_SETTING, *(n.name for n in numbers)}
    leave |= {name for name in result if name.startswith(("std_", "probe_"))}
    name = cell_name(result.get("max_concurrency"), result.get("request_rate"))
    return ForeignCell(name=name, settings=settings_of(result, leave), numbers=numbers)


def _rule(name: str, is_chat: bool) -> Rule | None:
    begin = _ROLE if is_chat else ""
    like = {
        "ttft": ("ttft_ms", begin),
        "tpot": ("tpot_ms", begin),
        "itl": ("itl_ms", begin),
        "e2el": ("latency_ms", _END),
    }
    return _FLAT.get(name) or statistic_rule(name, like)
