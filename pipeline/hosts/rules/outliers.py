"""Hosts and cards that differ from others of their kind, by a setting or by a measurement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from statistics import median, median_low
from typing import Any

from pipeline.core.known import Unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.model import SAME_MEMORY, HostFacts
from pipeline.hosts.probes.runner import ProbeRow
from pipeline.hosts.rules.verdict import gpus_of

# Measurements of sound machines of one kind differ by a few percent; this much is a fault.
TOLERANCE = 0.15
# Of two that differ, either may be the wrong one.
_FEWEST = 3
# Fields in which cards of one name must be equal.
_CARD = (
    *("vbios", "bar1_bytes", "memory_bytes", "ecc", "persistence"),
    *("link.width", "link.generation_max", "power.limit_w", "clocks.sm_max_mhz"),
    *("clocks.memory_max_mhz",),
)
_HOST = (
    *("driver.version", "driver.is_open", "driver.hmm_disabled", "driver.registry", "pci.iommu"),
    *("kernel.release", "bios", "cpu.name", "cpu.governors", "software.os"),
)
# Fields in which hosts of one kind must be nearly equal.
_HOST_NEARLY = ("memory_bytes",)
Observations = dict[tuple[str, str], dict[str, Any]]


class Outlier(Frozen):
    """A host or card, the field in which it differs, and what the others have."""

    subject: str
    field: str
    value: str
    others: str


class Comparison(Frozen):
    """The outliers, and what could not be judged because there are too few of a kind."""

    outliers: list[Outlier]
    unjudged: list[str]
    compared: int


def find_outliers(
    hosts: Mapping[str, HostFacts], probes: Mapping[str, Sequence[ProbeRow]] | None = None
) -> Comparison:
    """Cards against cards of the same name, hosts against hosts with the same cards."""
    settings: Observations = {}
    nearly: Observations = {}
    measured: Observations = {}
    for name, facts in hosts.items():
        # hosts with the same cards are of one kind
        counts = Counter(str(gpu.name) for gpu in gpus_of(facts))
        kind = ", ".join(f"{n} x {card}" for card, n in sorted(counts.items())) or "no cards"
        for field in _HOST:
            settings.setdefault((kind, field), {})[name] = attrgetter(field)(facts)
        for gpu in gpus_of(facts):
            for field in _CARD:
                of_card = settings.setdefault((f"{gpu.name}", field), {})
                of_card[f"{name} GPU {gpu.index}"] = attrgetter(field)(gpu)
        for field in _HOST_NEARLY:
            nearly.setdefault((kind, field), {})[name] = attrgetter(field)(facts)
        for key, value in _measured((probes or {}).get(name, ())):
            measured.setdefault((kind, key), {})[name] = value
    outliers: list[Outlier] = []
    unjudged: list[str] = []
    settings |= {key: _nearly_equal(values) for key, values in nearly.items()}
    for (kind, field), values in sorted(settings.items()):
        outliers += _by_majority(kind, field, values, unjudged)
    for (kind, field), values in sorted(measured.items()):
        outliers += _by_median(kind, field, values, unjudged)
    return Comparison(outliers=outliers, unjudged=unjudged, compared=len(settings) + len(measured))


def _measured(rows: Sequence[ProbeRow]) -> Iterator[tuple[str, float]]:
    """Numbers of function tests by row, so that larger is worse: rates become seconds per GB."""
    for row in rows:
        numbers, name = row.measured, f"{row.check} {row.subject}"
        # as in a model's layers, which reduce one after the other
        if row.check == "latency" and "in_a_row_us" in numbers:
            yield name, float(numbers["in_a_row_us"])
        rate = numbers.get("bus_gb_per_s") or numbers.get("gb_per_s")
        if row.check in ("copy", "bandwidth") and rate:
            yield f"{name} (s/GB)", 1.0 / float(rate)


def _nearly_equal(values: dict[str, Any]) -> dict[str, Any]:
    """Sizes close to the median are replaced by it."""
    sizes = {s: v for s, v in values.items() if not isinstance(v, Unknown)}
    if not sizes:
        return values
    usual = median_low(sizes.values())
    near = {s for s, v in sizes.items() if abs(v - usual) <= SAME_MEMORY * usual}
    return {s: usual if s in near else v for s, v in values.items()}


def _by_majority(
    kind: str, field: str, values: dict[str, Any], unjudged: list[str]
) -> list[Outlier]:
    texts = {
        subject: f"unknown: {value.unknown}" if isinstance(value, Unknown) else str(value)
        for subject, value in values.items()
    }
    if len(set(texts.values())) <= 1:
        return []
    usual, times = Counter(texts.values()).most_common(1)[0]
    if len(texts) < _FEWEST or times * 2 <= len(texts):
        unjudged.append(f"{kind}: {field}: {len(texts)} differ, and no value has a majority")
        return []
    return [
        Outlier(subject=s, field=field, value=text, others=usual)
        for s, text in texts.items()
        if text != usual
    ]


def _by_median(
    kind: str, field: str, values: dict[str, float], unjudged: list[str]
) -> list[Outlier]:
    if len(values) < _FEWEST:
        unjudged.append(f"{kind}: {field}: measured on {len(values)} hosts, three are needed")
        return []
    usual = median(values.values())
    return [
        Outlier(subject=s, field=field, value=f"{v:.4g}", others=f"{usual:.4g}")
        for s, v in values.items()
        if v > usual * (1 + TOLERANCE)
    ]
