"""What a trial samples beside its requests: the engine's own metrics, and the cards.

vLLM always has /metrics, SGLang with --enable-metrics, llama.cpp with --metrics. The cards are read
with nvidia-smi: power, clocks, what slows them, memory, and the PCIe link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pipeline.core.known import Known, Unknown, then, unknown
from pipeline.hosts.facts.model import Gpu
from pipeline.hosts.facts.smi import read_gpus, read_log, text_at
from pipeline.serving.bench import model
from pipeline.serving.bench.metrics import Speculated, added, metrics_of
from pipeline.serving.bench.model import Engine, EngineSeries, GpuSeries, RequestRow
from pipeline.serving.bench.workload import Objectives

Value = TypeVar("Value")
_LINE = re.compile(r"^([a-z_]+:[a-zA-Z0-9_:]+)(?:\{[^}]*\})? ([-+0-9.eE]+)", re.M)
# By the names with which their metrics begin.
ENGINES: dict[str, Engine] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
# Our name, and the engines' names for it; the first that an answer has counts.
GAUGES: dict[str, tuple[str, ...]] = {
    "running": (
        *("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    ),
    "waiting": (
        *("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
    ),
    # renamed by vLLM 0.10; llama.cpp had it until 2025
    "kv_use": (
        *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
        "llamacpp:kv_cache_usage_ratio",
    ),
    "acceptance": ("sglang:spec_accept_length",),
}
COUNTERS = {
    "prompt_tokens": tuple(f"{engine}:prompt_tokens_total" for engine in ENGINES),
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
# No slowdown: clocks that an administrator set on purpose.
_HARMLESS = ("applications_clocks_setting", "display_clocks_setting")


class Reading(NamedTuple):
    """One answer of /metrics: every name with its sum over all labels, and with its highest."""

    sums: Mapping[str, float]
    most: Mapping[str, float]

    @property
    def engine(self) -> Engine | None:
        prefixes = {name.split(":")[0] for name in self.sums}
        return next((engine for p, engine in ENGINES.items() if p in prefixes), None)

    def gauge(self, name: str) -> float | None:
        """A gauge by our name."""
        # a share is not added up over replicas
        table = self.most if name in ("kv_use", "acceptance") else self.sums
        return next((table[each] for each in GAUGES[name] if each in table), None)

    def counters(self) -> dict[str, float]:
        """The counters by our names, as far as the engine has them."""
        known = {name: [n for n in theirs if n in self.sums] for name, theirs in COUNTERS.items()}
        return {name: self.sums[theirs[0]] for name, theirs in known.items() if theirs}

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


def engine_series(readings: Sequence[tuple[float, Reading]]) -> EngineSeries | None:
    """A trial's readings, with the rise of each counter."""
    if not readings:
        return None
    first, last = readings[0][1].counters(), readings[-1][1].counters()
    gauges = {name: [reading.gauge(name) for _, reading in readings] for name in GAUGES}
    if not any(value is not None for value in gauges["acceptance"]):
        gauges["acceptance"] = []
    # a counter that fell belongs to an engine that was started anew
    rises = {n: last[n] - value for n, value in first.items() if last.get(n, -1) >= value}
    return EngineSeries(at_s=[round(at, 3) for at, _ in readings], counters=rises, **gauges)


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


class CardReading(NamedTuple):
    """One card at one time."""

    gpu: Gpu
    temperature_c: float | None
    memory_used_bytes: int | None
    utilization_percent: float | None


def read_cards(text: str) -> Known[list[CardReading]]:
    """Every card, from `nvidia-smi -q -x`."""
    gpus, root = read_gpus(text, unknown("not asked for")), read_log(text)
    if isinstance(gpus, Unknown):
        return gpus
    assert not isinstance(root, Unknown)  # `read_gpus` has read it
    cards = []
    for gpu, card in zip(gpus, root.findall("gpu"), strict=True):
        paths = ("temperature/gpu_temp", "fb_memory_usage/used", "utilization/gpu_util")
        # such as `61 C`, `1024 MiB` and `98 %`
        values = [then(text_at(card, path), lambda text: float(text.split()[0])) for path in paths]
        celsius, mebibytes, percent = (_plain(value) for value in values)
        used = None if mebibytes is None else int(mebibytes) << 20
        cards.append(CardReading(gpu, celsius, used, percent))
    return cards


def _plain(value: Known[Value]) -> Value | None:
    return None if isinstance(value, Unknown) else value


def gpu_series(readings: Sequence[tuple[float, Sequence[CardReading]]]) -> list[GpuSeries]:
    """A trial's readings, one series for each card; a card that got lost ends them all."""
    series = []
    for index in range(len(readings[0][1]) if readings else 0):
        same = [(at, each[index]) for at, each in readings if len(each) == len(readings[0][1])]
        cards, gpu = [card for _, card in same], same[0][1].gpu
        slowed = [_plain(card.gpu.slowed_by) or [] for card in cards]
        series.append(
            GpuSeries(
                index=gpu.index,
                name=_plain(gpu.name) or "unknown",
                uuid=_plain(gpu.uuid) or "",
                at_s=[round(at, 3) for at, _ in same],
                power_w=[_plain(card.gpu.power.draw_w) for card in cards],
                sm_clock_mhz=[_plain(card.gpu.clocks.sm_mhz) for card in cards],
                memory_clock_mhz=[_plain(card.gpu.clocks.memory_mhz) for card in cards],
                temperature_c=[card.temperature_c for card in cards],
                memory_used_bytes=[card.memory_used_bytes for card in cards],
                utilization_percent=[card.utilization_percent for card in cards],
                throttle=[[why for why in each if why not in _HARMLESS] for each in slowed],
                pcie_generation=[_plain(card.gpu.link.generation) for card in cards],
                pcie_width=[_plain(card.gpu.link.width) for card in cards],
                pcie_generation_most=_plain(gpu.link.generation_max),
                pcie_width_most=_plain(gpu.link.width_max),
                pcie_replays=[_plain(card.gpu.link.replays) for card in cards],
            )
        )
    return series


def energy_j(series: Sequence[GpuSeries]) -> float | None:
    """Of all cards over the readings, by the trapezoid rule; none where a card does not say."""
    total = 0.0
    for card in series:
        points = [(at, w) for at, w in zip(card.at_s, card.power_w, strict=True) if w is not None]
        if len(points) < 2:
            return None
        total += added((b - a) * (v + w) / 2 for (a, v), (b, w) in pairwise(points))
    return total if series else None


def trial_metrics(
    rows: Iterable[RequestRow], objectives: Objectives | None, samples: model.Samples
) -> model.Metrics:
    """All metrics of a trial, from its requests and from what was sampled beside them."""
    energy, drafts = energy_j(samples.gpus), speculated(samples.engine)
    return metrics_of(rows, objectives, energy_j=energy, speculated=drafts)
