"""Computes each metric from the raw requests; `metrics.yaml` defines them for people.

Anybody can compute them again from `requests.jsonl`: nothing else goes in, except for energy and
speculation, which are sampled.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from pydantic import RootModel

from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.bench import model
from pipeline.serving.bench.model import Interval, Metrics, Quantiles, RequestRow, Samples
from pipeline.serving.bench.workload import Objectives


class Definition(Frozen):
    """What a number means, for people."""

    title: str
    unit: str = ""
    text: str
    better: Literal["more", "less", "none"] = "none"


class _Definitions(RootModel[dict[str, Definition]]):
    """The whole of `metrics.yaml`."""


DEFINITIONS = read_yaml(Path(__file__).with_name("metrics.yaml"), _Definitions).root
# Two-sided 95 % quantiles of Student's t, by degrees of freedom. Of degrees in between, the lower
# counts: its interval is wider.
# https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm
_T95 = {
    **{1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262},
    **{10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 100: 1.984},
}
_COUNTS = (
    *("requests", "completed", "failed", "retries", "looping", "input_tokens", "output_tokens"),
)
_DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms", "prefill_tok_s", "decode_tok_s")
_MOST_SECONDS = 10_000_000  # of a peak's table


class Speculated(NamedTuple):
    """What the engine's counters say of speculation."""

    acceptance_length: float | None = None
    verifier_steps: int | None = None


class _Sums:
    """All that metrics need of the rows, so that these need not be kept."""

    def __init__(self, goals: Objectives) -> None:
        self.goals = goals.ttft_ms, goals.tpot_ms, goals.latency_ms
        # whole numbers by the name of their metric, and `chunks` and `within`
        self.counts: Counter[str] = Counter()
        self.values = {name: array("d") for name in _DISTRIBUTIONS}
        self.begin, self.end, self.busy_s = math.inf, 0.0, 0.0
        self.tokens_in_second: dict[int, float] = {}
        self.parts: list[RequestRow] = []  # of a cell with reads
        # of a trace: TTFT by turn, and the begin and end of each session
        self.turns: dict[int, array[float]] = {}
        self.sessions: dict[int, tuple[float, float]] = {}

    def add(self, row: RequestRow) -> None:
        counts, first_s, end_s = self.counts, row.first_token_s, row.end_s
        counts.update(requests=1, retries=row.retries, looping=row.looping)
        self.begin = min(self.begin, row.sent_s)
        self.end = max(self.end, row.sent_s + (end_s or 0.0))
        if not row.is_good or first_s is None or end_s is None:
            counts["failed"] += 1
            return
        read, written = row.input_tokens or 0, row.tokens
        counts.update(completed=1, input_tokens=read, output_tokens=written, chunks=row.chunks)
        if row.cached is not None:
            counts["cached_tokens"] += row.cached
        self.busy_s += end_s
        if row.part:
            self.parts.append(row)
        if row.part == "reader":
            return  # latencies are those of the writers
        if row.repeated_tokens is not None:
            counts.update(repeated=row.repeated_tokens, asked=row.asked_input or 0)
            self.turns.setdefault(row.turn or 0, array("d")).append(first_s * 1e3)
            begin, end = self.sessions.get(row.conversation or 0, (math.inf, 0.0))
            span = min(begin, row.sent_s), max(end, row.sent_s + end_s)
            self.sessions[row.conversation or 0] = span
        ttft, tpot, latency = first_s * 1e3, tpot_ms(row), end_s * 1e3
        fresh = read - (row.cached or 0)
        self.values["ttft_ms"].append(ttft)
        self.values["latency_ms"].append(latency)
        self.values["itl_ms"].extend(gap / 1e3 for gap in row.gaps_us)
        if tpot is not None:
            self.values["tpot_ms"].append(tpot)
        if tpot:
            self.values["decode_tok_s"].append(1e3 / tpot)
        if fresh > 0 and first_s > 0:
            self.values["prefill_tok_s"].append(fresh / first_s)
        pairs = zip(self.goals, (ttft, tpot or 0.0, latency), strict=True)
        counts["within"] += all(most is None or value <= most for most, value in pairs)
        # an answer's tokens, spread over the seconds in which its events came
        share, at = written / max(row.chunks, 1), row.sent_s + first_s
        for gap in (0, *row.gaps_us):
            at += gap / 1e6
            second = min(int(at), _MOST_SECONDS)
            self.tokens_in_second[second] = self.tokens_in_second.get(second, 0.0) + share

    @property
    def trace(self) -> dict[str, object]:
        """What a replayed trace shows."""
        counts, by_turn = self.counts, dict[str, list[float]]()
        for turn in sorted(self.turns):
            # the turns that are shown together: 1, 2, 3-4, 5-8 and so on
            upper = 1 << turn.bit_length()
            name = str(turn + 1) if turn < 2 else f"{upper // 2 + 1}-{upper}"
            by_turn.setdefault(name, []).extend(self.turns[turn])
        if not by_turn:
            return {}
        cached, read = counts.get("cached_tokens"), counts["input_tokens"]
        spans = [end - begin for begin, end in self.sessions.values()]
        return {
            "cached_share": None if cached is None or not read else _rounded(cached / read),
            "repeated_share": _rounded(counts["repeated"] / max(1, counts["asked"])),
            "ttft_by_turn_ms": {n: _rounded(added(v) / len(v)) for n, v in by_turn.items()},
            "session_s": quantiles(spans),
        }

    @property
    def interference(self) -> dict[str, float]:
        """How fast writers decode while nobody reads and while somebody does, and the worst pause.

        The tokens of an event are spread evenly over the gap before it, which may be under load in
        part. A pause counts as a whole: one that a read causes may begin before and end after it.
        """
        rows = self.parts
        reads = [row for row in rows if row.part == "reader"]
        spans = [(row.sent_s, row.sent_s + (row.end_s or 0.0)) for row in reads]
        # tokens and seconds: alone, and under load
        tokens, seconds, worst_s = [0.0, 0.0], [0.0, 0.0], 0.0
        for row in rows:
            at = row.sent_s + (row.first_token_s or 0.0)
            for gap in row.gaps_us if row.part == "writer" else ():
                begin, at, took = at, at + gap / 1e6, gap / 1e6
                inside = (min(at, end) - max(begin, start) for start, end in spans)
                loaded_s = added(each for each in inside if each > 0)
                # of events in one read, which have no time between them
                share = loaded_s / took if took else any(start <= at <= end for start, end in spans)
                count, worst_s = row.tokens / row.chunks, max(worst_s, took if loaded_s else 0.0)
                for under, part, part_s in ((0, 1 - share, took - loaded_s), (1, share, loaded_s)):
                    tokens[under] += count * part
                    seconds[under] += part_s
        alone, loaded = (t / s if s else None for t, s in zip(tokens, seconds, strict=True))
        fresh = [(r, (r.input_tokens or 0) - (r.cached or 0)) for r in reads]
        speeds = [n / r.first_token_s for r, n in fresh if r.first_token_s and n > 0]
        numbers = {
            "decode_alone_tok_s": alone,
            "decode_under_load_tok_s": loaded,
            "decode_kept": loaded / alone if loaded is not None and alone else None,
            "worst_pause_ms": worst_s * 1e3 if loaded is not None else None,
            "read_tok_s": added(speeds) / len(speeds) if speeds else None,
        }
        known = {name: _rounded(value) for name, value in numbers.items() if value is not None}
        return {"reads": len(reads), **known} if rows else {}


def tpot_ms(row: RequestRow) -> float | None:
    """Time per output token of one request; none with fewer than two tokens."""
    if row.tokens < 2 or row.first_token_s is None:
        return None
    return sum(row.gaps_us) / 1e3 / (row.tokens - 1)


def metrics_of(
    rows: Iterable[RequestRow],
    objectives: Objectives | None = None,
    *,
    energy_j: float | None = None,
    speculated: Speculated | None = None,
) -> Metrics:
    """All metrics of one trial."""
    sums = _Sums(objectives or Objectives())
    for row in rows:
        sums.add(row)
    counts = sums.counts
    duration = max(sums.end - sums.begin, 1e-9) if counts["requests"] else 1e-9
    per_s = 1.0 / duration
    inputs, outputs, chunks = counts["input_tokens"], counts["output_tokens"], counts["chunks"]
    numbers = {
        "duration_s": duration,
        "output_tok_s": outputs * per_s,
        "total_tok_s": (inputs + outputs) * per_s,
        "peak_output_tok_s": max(sums.tokens_in_second.values(), default=0.0),
        "requests_s": counts["completed"] * per_s,
        "goodput_s": counts["within"] * per_s if objectives else None,
        "concurrency": sums.busy_s * per_s,
        "tokens_per_chunk": outputs / chunks if chunks else None,
        "energy_j": energy_j,
        "joules_per_output_token": None if energy_j is None or not outputs else energy_j / outputs,
    }
    whole = {name: counts[name] for name in _COUNTS}
    known = {name: None if value is None else _rounded(value) for name, value in numbers.items()}
    spread = {name: quantiles(values) for name, values in sums.values.items()}
    drafts = (speculated or Speculated())._asdict()
    # no row has it: the server does not say what it had in its cache
    cached = {"cached_tokens": counts.get("cached_tokens")}
    return Metrics.model_validate(
        {**whole, **cached, **known, **spread, **drafts, **sums.interference, **sums.trace}
    )


def added(values: Iterable[float]) -> float:
    """Sums from left to right, alike in every Python.

    From 3.12 on, `sum` compensates for what each addition of floats rounds away; this function
    gives the numbers again that 3.11 signed.
    """
    return reduce(operator.add, values, 0.0)


def _rounded(value: float) -> float:
    """Rounds to six decimals: clocks are not finer, and two Pythons write the same."""
    return round(value, 6)


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """The distribution of values in any order; none if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    last, found = len(ordered) - 1, {}
    for percent in (50, 90, 95, 99):
        # linear between the two nearest values, as numpy does and so vLLM and SGLang do
        at = percent / 100 * last
        low, high = ordered[int(at)], ordered[min(int(at) + 1, last)]
        found[f"p{percent}"] = _rounded(low + (high - low) * (at - int(at)))
    return Quantiles(
        count=len(ordered),
        mean=_rounded(math.fsum(ordered) / len(ordered)),
        least=_rounded(ordered[0]),
        most=_rounded(ordered[-1]),
        **found,
    )


def flat(metrics: Metrics) -> dict[str, float]:
    """Every known number by its name: `output_tok_s`, `ttft_ms.p99` …."""
    result: dict[str, float] = {}
    for name, value in metrics.model_dump().items():
        if isinstance(value, dict):
            result |= {f"{name}.{part}": n for part, n in value.items() if part != "count"}
        elif value is not None:
            result[name] = float(value)
    return result


def intervals(trials: Sequence[model.Trial]) -> dict[str, Interval]:
    """Mean and 95 % confidence of each metric over trials; void ones are left out."""
    numbers = independent_numbers(trials)
    names = sorted({name for each in numbers for name in each})
    return {name: interval([each[name] for each in numbers if name in each]) for name in names}


def independent_numbers(trials: Sequence[model.Trial]) -> list[dict[str, float]]:
    """The numbers of each good trial; of several starts of the engine, the means of each start.

    Trials of one start share its state, so more of them say nothing about another start.
    """
    good = [trial for trial in trials if not trial.void]
    if any(trial.start is None for trial in good):
        return [flat(trial.metrics) for trial in good]
    found = []
    for start in sorted({trial.start for trial in good if trial.start is not None}):
        every = [flat(trial.metrics) for trial in good if trial.start == start]
        names = dict.fromkeys(name for each in every for name in each)
        known = {name: [each[name] for each in every if name in each] for name in names}
        found.append({name: added(values) / len(values) for name, values in known.items()})
    return found


def interval(values: Sequence[float]) -> Interval:
    """Where the true mean is, with 95 % confidence, if trials err at random."""
    mean, freedom = fmean(values), len(values) - 1
    if not freedom:
        return Interval(mean=_rounded(mean), low=None, high=None, trials=1)
    t = _T95[max(each for each in _T95 if each <= freedom)]
    half = t * stdev(values) / math.sqrt(len(values))
    low, high = _rounded(mean - half), _rounded(mean + half)
    return Interval(mean=_rounded(mean), low=low, high=high, trials=len(values))


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


def speculated(engine: model.EngineSeries | None) -> Speculated:
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


def energy_j(series: Sequence[model.GpuSeries]) -> float | None:
    """The energy of all cards, by the trapezoid rule; none if a card does not say."""
    total = 0.0
    for card in series:
        points = [(at, w) for at, w in zip(card.at_s, card.power_w, strict=True) if w is not None]
        if len(points) < 2:
            return None
        total += added((b - a) * (v + w) / 2 for (a, v), (b, w) in pairwise(points))
    return total if series else None


def trial_metrics(
    rows: Iterable[RequestRow], objectives: Objectives | None, samples: Samples
) -> Metrics:
    """All metrics of a trial, from its requests and from what was sampled beside them."""
    energy, drafts = energy_j(samples.gpus), speculated(samples.engine)
    return metrics_of(rows, objectives, energy_j=energy, speculated=drafts)
