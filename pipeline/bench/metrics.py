"""One written definition for each metric, and how it is computed from the raw requests.

Anybody can compute them again from `requests.jsonl`: nothing else goes in, but for energy and
speculation, which are sampled.
"""

from __future__ import annotations

import functools
import math
import operator
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from statistics import fmean, stdev
from typing import NamedTuple

from pipeline.bench.model import Interval, Metrics, Quantiles, RequestRow, Trial
from pipeline.bench.workload import Objectives


class Definition(NamedTuple):
    """What a number means, for people."""

    title: str
    unit: str
    text: str
    better: str  # more, less or none


DEFINITIONS: dict[str, Definition] = {
    "duration_s": Definition(
        "Duration",
        "s",
        "From the first request's first byte to the last answer's last byte; warm-up apart.",
        "none",
    ),
    "requests": Definition("Requests", "", "All that were sent, once each.", "none"),
    "completed": Definition("Completed", "", "Requests with a whole answer.", "more"),
    "failed": Definition("Failed", "", "Requests without one, after retries.", "less"),
    "retries": Definition("Retries", "", "How often a 429 or 503 was tried again.", "less"),
    "looping": Definition("Looping", "", "Answers that repeat themselves.", "less"),
    "input_tokens": Definition(
        "Input tokens", "tok", "Prompt tokens of completed requests, by the server's usage.", "none"
    ),
    "output_tokens": Definition(
        "Output tokens",
        "tok",
        "Generated tokens of completed requests, reasoning included, by the server's usage; events"
        " with text where it gives none.",
        "none",
    ),
    "cached_tokens": Definition(
        "Cached tokens", "tok", "Prompt tokens that the server found in its cache.", "none"
    ),
    "output_tok_s": Definition(
        "Output throughput", "tok/s", "Output tokens divided by the duration.", "more"
    ),
    "total_tok_s": Definition(
        "Total throughput",
        "tok/s",
        "Input and output tokens divided by the duration. It counts what a server reads as much as"
        " what it writes, cached or not: never to be compared with output throughput.",
        "more",
    ),
    "peak_output_tok_s": Definition(
        "Peak output over 1 s",
        "tok/s",
        "The most output tokens that arrived within one of the whole seconds since the first"
        " request. An answer's tokens are spread evenly over its events.",
        "more",
    ),
    "requests_s": Definition(
        "Requests", "1/s", "Completed requests divided by the duration.", "more"
    ),
    "goodput_s": Definition(
        "Goodput", "1/s", "Completed requests that keep every objective, by the duration.", "more"
    ),
    "concurrency": Definition(
        "Concurrency", "", "Requests under way, on average over the duration.", "none"
    ),
    "ttft_ms": Definition(
        "TTFT",
        "ms",
        "Time to first token: from a request's first byte to the first event with text, on a"
        " connection that is open already.",
        "less",
    ),
    "tpot_ms": Definition(
        "TPOT",
        "ms",
        "Time per output token: from the first to the last event with text, divided by output"
        " tokens less one. As vLLM and SGLang define it; aiperf and guidellm call it ITL.",
        "less",
    ),
    "itl_ms": Definition(
        "ITL",
        "ms",
        "Inter-token latency: each gap between one event with text and the next. With speculation"
        " or a stream interval an event has several tokens, and this is more than TPOT.",
        "less",
    ),
    "latency_ms": Definition(
        "Latency", "ms", "From a request's first byte to its answer's last byte.", "less"
    ),
    "prefill_tok_s": Definition(
        "Prefill speed",
        "tok/s",
        "Of each request: prompt tokens that were not cached, divided by TTFT. Alone at a time it"
        " is the speed of reading (PP); with others it also has their queue.",
        "more",
    ),
    "decode_tok_s": Definition(
        "Decode speed for a user",
        "tok/s",
        "Of each request: the inverse of TPOT. Alone at a time it is the speed of writing (TG).",
        "more",
    ),
    "acceptance_length": Definition(
        "Acceptance length",
        "tok",
        "Tokens that one step of the verifier yields on average, its own included, by the engine's"
        " counters.",
        "more",
    ),
    "verifier_steps": Definition(
        "Verifier steps", "", "Steps of the target model over draft tokens, by the engine.", "none"
    ),
    "tokens_per_chunk": Definition(
        "Tokens per event", "tok", "Output tokens divided by events with text.", "none"
    ),
    "energy_j": Definition(
        "Energy", "J", "Power of all sampled GPUs over the duration, by the trapezoid rule.", "less"
    ),
    "joules_per_output_token": Definition(
        "Energy per output token", "J/tok", "Energy of the GPUs by output tokens.", "less"
    ),
    "ready_s": Definition(
        "Start until ready", "s", "From the start of the engine until its health is good.", "less"
    ),
    "start_to_first_token_s": Definition(
        "Start to first token",
        "s",
        "From the start of the engine to the first event with text of its first answer.",
        "less",
    ),
}
# Two-sided 95 % quantiles of Student's t, by degrees of freedom; beyond, the next lower is taken.
# https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm
_T95 = {
    **{1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262},
    **{10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 100: 1.984},
}
_MOST_SECONDS = 10_000_000  # of a peak's table


class Speculated(NamedTuple):
    """What the engine's counters say of speculation."""

    acceptance_length: float | None = None
    verifier_steps: int | None = None


class _Sums:
    """All that metrics need of the rows, so that these need not be kept."""

    def __init__(self, objectives: Objectives | None) -> None:
        self.objectives = objectives
        self.requests = self.completed = self.failed = self.retries = self.looping = 0
        self.input_tokens = self.output_tokens = self.chunks = self.within = 0
        self.cached: int | None = None
        self.begin, self.end = math.inf, 0.0
        self.busy_s = 0.0
        self.seconds: dict[int, float] = {}
        self.ttft, self.tpot, self.itl, self.latency = (array("d") for _ in range(4))
        self.prefill, self.decode = array("d"), array("d")

    def add(self, row: RequestRow) -> None:
        self.requests += 1
        self.retries += row.retries
        self.looping += row.looping
        self.begin = min(self.begin, row.sent_s)
        self.end = max(self.end, row.sent_s + (row.end_s or 0.0))
        if not row.is_good or row.first_token_s is None or row.end_s is None:
            self.failed += 1
            return
        self.completed += 1
        self.input_tokens += row.input_tokens or 0
        self.output_tokens += row.tokens
        self.chunks += row.chunks
        if row.cached_tokens is not None:
            self.cached = (self.cached or 0) + row.cached_tokens
        self._times(row, row.first_token_s, row.end_s)

    def _times(self, row: RequestRow, first_s: float, end_s: float) -> None:
        self.busy_s += end_s
        self.ttft.append(first_s * 1e3)
        self.latency.append(end_s * 1e3)
        self.itl.extend(gap / 1e3 for gap in row.gaps_us)
        tpot = tpot_ms(row)
        if tpot is not None:
            self.tpot.append(tpot)
        if tpot:
            self.decode.append(1e3 / tpot)
        fresh = (row.input_tokens or 0) - (row.cached_tokens or 0)
        if fresh > 0 and first_s > 0:
            self.prefill.append(fresh / first_s)
        self.within += _keeps(self.objectives, first_s * 1e3, tpot, end_s * 1e3)
        self._spread(row, first_s)

    def _spread(self, row: RequestRow, first_s: float) -> None:
        """An answer's tokens over the seconds in which its events came."""
        share = row.tokens / max(row.chunks, 1)
        at = row.sent_s + first_s
        for gap in (0, *row.gaps_us):
            at += gap / 1e6
            second = min(int(at), _MOST_SECONDS)
            self.seconds[second] = self.seconds.get(second, 0.0) + share


def tpot_ms(row: RequestRow) -> float | None:
    """Time per output token of one request; none with fewer than two tokens."""
    if row.tokens < 2 or row.first_token_s is None:
        return None
    return sum(row.gaps_us) / 1e3 / (row.tokens - 1)


def _keeps(goals: Objectives | None, ttft: float, tpot: float | None, latency: float) -> bool:
    if goals is None:
        return False
    pairs = ((goals.ttft_ms, ttft), (goals.tpot_ms, tpot or 0.0), (goals.latency_ms, latency))
    return all(most is None or value <= most for most, value in pairs)


def metrics_of(
    rows: Iterable[RequestRow],
    objectives: Objectives | None = None,
    *,
    energy_j: float | None = None,
    speculated: Speculated | None = None,
) -> Metrics:
    """All metrics of one trial."""
    sums = _Sums(objectives)
    for row in rows:
        sums.add(row)
    speculated = speculated or Speculated()
    duration = max(sums.end - sums.begin, 1e-9) if sums.requests else 1e-9
    per_s = 1.0 / duration
    has_energy = energy_j is not None and sums.output_tokens
    return Metrics(
        duration_s=round(duration, 6),
        requests=sums.requests,
        completed=sums.completed,
        failed=sums.failed,
        retries=sums.retries,
        looping=sums.looping,
        input_tokens=sums.input_tokens,
        output_tokens=sums.output_tokens,
        cached_tokens=sums.cached,
        output_tok_s=_rounded(sums.output_tokens * per_s),
        total_tok_s=_rounded((sums.input_tokens + sums.output_tokens) * per_s),
        peak_output_tok_s=_rounded(max(sums.seconds.values(), default=0.0)),
        requests_s=_rounded(sums.completed * per_s),
        goodput_s=_rounded(sums.within * per_s) if objectives else None,
        concurrency=_rounded(sums.busy_s * per_s),
        ttft_ms=quantiles(sums.ttft),
        tpot_ms=quantiles(sums.tpot),
        itl_ms=quantiles(sums.itl),
        latency_ms=quantiles(sums.latency),
        prefill_tok_s=quantiles(sums.prefill),
        decode_tok_s=quantiles(sums.decode),
        acceptance_length=speculated.acceptance_length,
        verifier_steps=speculated.verifier_steps,
        tokens_per_chunk=_rounded(sums.output_tokens / sums.chunks) if sums.chunks else None,
        energy_j=None if energy_j is None else _rounded(energy_j),
        joules_per_output_token=(
            _rounded(energy_j / sums.output_tokens) if energy_j is not None and has_energy else None
        ),
    )


def added(values: Iterable[float]) -> float:
    """A sum from left to right, alike in every Python.

    From 3.12 on `sum` makes up for what each addition of floats rounds away; what was signed by
    3.11 is computed again by this.
    """
    return functools.reduce(operator.add, values, 0.0)


def _rounded(value: float) -> float:
    """Six digits after the point: clocks are not finer, and two Pythons write the same."""
    return round(value, 6)


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """A distribution of values in any order; none of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return Quantiles(
        count=len(ordered),
        mean=_rounded(math.fsum(ordered) / len(ordered)),
        p50=quantile(ordered, 0.50),
        p90=quantile(ordered, 0.90),
        p95=quantile(ordered, 0.95),
        p99=quantile(ordered, 0.99),
        least=_rounded(ordered[0]),
        most=_rounded(ordered[-1]),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as numpy does and so vLLM and SGLang do."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return _rounded(ordered[low] + (ordered[high] - ordered[low]) * (at - low))


def flat(metrics: Metrics) -> dict[str, float]:
    """Every number by its name: `output_tok_s`, `ttft_ms.p99` …; what is not known is left out."""
    result: dict[str, float] = {}
    for name, value in metrics.model_dump().items():
        if isinstance(value, dict):
            parts = {f"{name}.{part}": number for part, number in value.items() if part != "count"}
            result |= parts
        elif value is not None:
            result[name] = float(value)
    return result


def intervals(trials: Sequence[Trial]) -> dict[str, Interval]:
    """Mean and 95 % confidence of each metric over trials; void ones are left out."""
    numbers = [flat(trial.metrics) for trial in trials if not trial.void]
    names = sorted({name for each in numbers for name in each})
    return {name: interval([each[name] for each in numbers if name in each]) for name in names}


def interval(values: Sequence[float]) -> Interval:
    """Where the true mean is, with 95 % confidence, if trials err at random."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=_rounded(mean), low=None, high=None, trials=len(values))
    half = t95(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    low, high = _rounded(mean - half), _rounded(mean + half)
    return Interval(mean=_rounded(mean), low=low, high=high, trials=len(values))


def t95(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t; of degrees between, the lower: it is wider."""
    return _T95[max(each for each in _T95 if each <= freedom)]


@cache
def t_quantile(doubt: float, freedom: int) -> float:
    """How far Student's t goes with all but so much doubt, on both sides together.

    By the finite series for whole degrees of freedom: Abramowitz and Stegun 26.7.3 and 26.7.4.
    """
    low, high = 0.0, 1e7
    for _ in range(100):
        t = (low + high) / 2
        angle = math.atan(t / math.sqrt(freedom))
        sine, cosine = math.sin(angle), math.cos(angle)
        is_odd = freedom % 2
        term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
        for step in range(2 + is_odd, freedom + 1, 2):
            total += term
            term *= cosine**2 * (step - 1) / step
        inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
        low, high = (t, high) if inside < 1 - doubt else (low, t)
    return high
