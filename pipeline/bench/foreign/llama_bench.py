"""`llama-bench -o json` and `-o jsonl`: an object for each test, with every repetition.

Read in tools/llama-bench of ggml-org/llama.cpp, whose README shows the form, and in
examples/llama-bench of ikawrakow/ik_llama.cpp, which names each test in a field of its own: with
`-gp` it reads a prompt first, and measures only what it writes then.
"""

from __future__ import annotations

from typing import Any

from pipeline.bench.foreign.model import (
    ForeignCell,
    Rule,
    is_number,
    number_of,
    settings_of,
    short,
)

_INSIDE = "is measured inside the engine: no server, no sampling, random tokens, one sequence"
_BOTH = "counts the tokens that are read and those that are written, by the time of both"
_NO_SETTING = ("test", "test_time", "n_prompt", "n_gen", "n_depth", "avg_ns", "stddev_ns", "avg_ts")


def is_llama_bench(value: Any) -> bool:
    """Whether an object is a test of llama-bench."""
    return isinstance(value, dict) and {"avg_ts", "n_prompt", "n_gen"} <= value.keys()


def read_llama_bench(tests: list[dict[str, Any]]) -> list[ForeignCell]:
    """A cell for each test, called as llama-bench's own table calls it."""
    return [_cell(test) for test in tests]


def _cell(test: dict[str, Any]) -> ForeignCell:
    prompt, output, depth = (_count(test.get(n)) for n in ("n_prompt", "n_gen", "n_depth"))
    parts = [f"pp{prompt}" if prompt else "", f"tg{output}" if output else ""]
    name = "+".join(part for part in parts if part) + (f" @ d{depth}" if depth else "")
    if isinstance(test.get("test"), str):
        name = short(test["test"])
        prompt = 0 if name.startswith("tg") else prompt
    if prompt and output:
        rule = Rule("total_tok_s", "tok/s", f"{_INSIDE}; {_BOTH}")
    else:
        rule = Rule("prefill_tok_s.mean" if prompt else "decode_tok_s.mean", "tok/s", _INSIDE)
    samples = test.get("samples_ts")
    number = number_of("avg_ts", samples if isinstance(samples, list) else [test["avg_ts"]], rule)
    settings = settings_of(test, (*_NO_SETTING, "stddev_ts"))
    return ForeignCell(name=name or "all", settings=settings, numbers=[number] if number else [])


def _count(value: Any) -> int:
    return int(value) if is_number(value) else 0
