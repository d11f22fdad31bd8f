"""Hosts and cards that differ from others of their kind, by a setting or by a measurement."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from statistics import median, median_low
from typing import Any

from pipeline.core.known import Unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.model import SAME_MEMORY, HostFacts, gpus_of
from pipeline.hosts.probes.runner import ProbeRow

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


class FleetComparison(Frozen):
    """The outliers, and what could not be judged because there are too few of a kind."""

    outliers: list[Outlier]
    unjudged: list[str]
    compared: int


def find_outliers(
    hosts: Mapping[str, HostFacts], probes: Mapping[str, Sequence[ProbeRow]] | None = None
) -> FleetComparison:
    """Compare cards of the same name, and hosts with the same cards."""
    settings: Observations = defaultdict(dict)
    nearly: Observations = defaultdict(dict)
    measured: Observations = defaultdict(dict)
    for name, facts in hosts.items():
        # hosts with the same cards are of one kind
        counts = Counter(str(gpu.name) for gpu in gpus_of(facts))
        kind = ", ".join(f"{n} x {card}" for card, n in sorted(counts.items())) or "no cards"
        for field in _HOST:
            settings[kind, field][name] = attrgetter(field)(facts)
        for gpu in gpus_of(facts):
            for field in _CARD:
                settings[f"{gpu.name}", field][f"{name} GPU {gpu.index}"] = attrgetter(field)(gpu)
        for field in _HOST_NEARLY:
            nearly[kind, field][name] = attrgetter(field)(facts)
        for row in (probes or {}).get(name, ()):
            numbers, key = row.measured, f"{row.check} {row.subject}"
            # as in a model's layers, which reduce one after the other
            if row.check == "latency" and "in_a_row_us" in numbers:
                measured[kind, key][name] = float(numbers["in_a_row_us"])
            rate = numbers.get("bus_gb_per_s") or numbers.get("gb_per_s")
            # larger must be worse: rates become seconds per GB
            if row.check in ("copy", "bandwidth") and rate:
                measured[kind, f"{key} (s/GB)"][name] = 1.0 / float(rate)
    for place, values in nearly.items():
        sizes = [v for v in values.values() if not isinstance(v, Unknown)]
        middle = median_low(sizes) if sizes else 0
        near = {v for v in sizes if abs(v - middle) <= SAME_MEMORY * middle}
        # sizes close to the median are replaced by it
        settings[place] = {s: middle if v in near else v for s, v in values.items()}
    found: list[tuple[str, str, dict[str, str]]] = []  # field, what is usual, and who differs
    unjudged: list[str] = []
    for (kind, field), values in sorted(settings.items()):
        texts = {
            subject: f"unknown: {value.unknown}" if isinstance(value, Unknown) else str(value)
            for subject, value in values.items()
        }
        usual, times = Counter(texts.values()).most_common(1)[0]
        if times < len(texts) and (len(texts) < _FEWEST or times * 2 <= len(texts)):
            unjudged.append(f"{kind}: {field}: {len(texts)} differ, and no value has a majority")
            continue
        found.append((field, usual, {s: text for s, text in texts.items() if text != usual}))
    for (kind, field), values in sorted(measured.items()):
        if len(values) < _FEWEST:
            unjudged.append(f"{kind}: {field}: measured on {len(values)} hosts, three are needed")
            continue
        usual_s = median(values.values())
        slow = {s: f"{v:.4g}" for s, v in values.items() if v > usual_s * (1 + TOLERANCE)}
        found.append((field, f"{usual_s:.4g}", slow))
    outliers = [
        Outlier(subject=subject, field=field, value=value, others=usual)
        for field, usual, differing in found
        for subject, value in differing.items()
    ]
    return FleetComparison(
        outliers=outliers, unjudged=unjudged, compared=len(settings) + len(measured)
    )
