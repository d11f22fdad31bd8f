"""What an engine says of itself while it works: the /metrics of vLLM, SGLang and llama.cpp.

vLLM has them always, SGLang with --enable-metrics, llama.cpp with --metrics.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.bench.metrics import Speculated, added
from pipeline.bench.model import Engine, EngineSeries

_LINE = re.compile(r"^([a-z_]+:[a-zA-Z0-9_:]+)(?:\{[^}]*\})? ([-+0-9.eE]+)", re.M)
_PREFIXES: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
# Our name, and what the engines call it; the first that is there counts.
GAUGES = {
    "running": (
        *("vllm:num_requests_running", "sglang:num_running_reqs"),
        "llamacpp:requests_processing",
    ),
    "waiting": (
        *("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
        "llamacpp:requests_deferred",
    ),
    # renamed by vLLM 0.10; llama.cpp had it until 2025
    "kv_use": (
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
        "llamacpp:kv_cache_usage_ratio",
    ),
    "acceptance": ("sglang:spec_accept_length",),
}
COUNTERS = {
    "prompt_tokens": (
        *("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
        "llamacpp:prompt_tokens_total",
    ),
    "generated_tokens": (
        *("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
        "llamacpp:tokens_predicted_total",
    ),
    "cached_tokens": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    "preemptions": ("vllm:num_preemptions_total",),
    "drafts": ("vllm:spec_decode_num_drafts_total",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
}


@dataclass(frozen=True)
class Reading:
    """One answer of /metrics: every name with its sum over all labels, and with its highest."""

    sums: Mapping[str, float]
    most: Mapping[str, float]

    @property
    def engine(self) -> Engine | None:
        prefixes = {name.split(":")[0] for name in self.sums}
        return next((engine for p, engine in _PREFIXES.items() if p in prefixes), None)

    def gauge(self, name: str) -> float | None:
        """A gauge by our name."""
        # a share is not added up over replicas
        table = self.most if name in ("kv_use", "acceptance") else self.sums
        return next((table[each] for each in GAUGES[name] if each in table), None)

    def counters(self) -> dict[str, float]:
        """The counters by our names, as far as the engine has them."""
        result = {}
        for name, theirs in COUNTERS.items():
            known = [self.sums[each] for each in theirs if each in self.sums]
            if known:
                result[name] = known[0]
        return result

    @property
    def busy(self) -> float | None:
        """Requests that run or wait."""
        running, waiting = self.gauge("running"), self.gauge("waiting")
        return None if running is None else running + (waiting or 0.0)


def read_metrics(text: str) -> Reading:
    """From the text that Prometheus reads."""
    sums: dict[str, float] = {}
    most: dict[str, float] = {}
    for name, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        sums[name] = sums.get(name, 0.0) + value
        most[name] = max(most.get(name, value), value)
    return Reading(sums, most)


def series(readings: Sequence[tuple[float, Reading]]) -> EngineSeries | None:
    """A trial's readings, with the rise of each counter."""
    if not readings:
        return None
    first, last = readings[0][1].counters(), readings[-1][1].counters()
    return EngineSeries(
        at_s=[round(at, 3) for at, _ in readings],
        running=[reading.gauge("running") for _, reading in readings],
        waiting=[reading.gauge("waiting") for _, reading in readings],
        kv_use=[reading.gauge("kv_use") for _, reading in readings],
        acceptance=_known([reading.gauge("acceptance") for _, reading in readings]),
        # a counter that fell belongs to an engine that was started anew
        counters={
            name: last[name] - value for name, value in first.items() if last.get(name, -1) >= value
        },
    )


def _known(values: list[float | None]) -> list[float | None]:
    return values if any(value is not None for value in values) else []


def speculated(engine: EngineSeries | None) -> Speculated:
    """Acceptance length and verifier steps, where the engine counts them."""
    if engine is None:
        return Speculated()
    drafts = engine.counters.get("drafts", 0.0)
    if drafts > 0:
        # the verifier adds a token of its own to those it accepts
        length = 1 + engine.counters.get("accepted_tokens", 0.0) / drafts
        return Speculated(round(length, 4), int(drafts))
    lengths = [value for value in engine.acceptance if value]
    return Speculated(round(added(lengths) / len(lengths), 4) if lengths else None, None)
