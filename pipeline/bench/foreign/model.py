"""What is read out of a foreign result: numbers under their own names, and what they are like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from pipeline.attest.strict import plain
from pipeline.model import Digest, Frozen

Program: TypeAlias = Literal[
    "vllm bench", "sglang.bench_serving", "aiperf", "guidellm", "llama-bench", "lil-bench"
]
# a run may name hundreds of settings, and somebody's file may name millions
_MOST_SETTINGS = 200
_MOST_TEXT = 200
_LARGEST = 1e18  # of anything that is measured; squares of it are still numbers
_QUANTILES = {"mean": "mean", "avg": "mean", "median": "p50", "p50": "p50"}
_QUANTILES |= {name: name for name in ("p90", "p95", "p99")}


class ForeignNumber(Frozen):
    """One number; several values where the program repeated the measurement."""

    name: str  # as its program calls it
    unit: str
    values: list[float]
    like: str | None = None  # the nearest metric of ours, such as `ttft_ms.p99`
    difference: str = ""  # how its definition differs from that one; empty: not at all

    @property
    def ours(self) -> str | None:
        """The metric of ours that it may be compared with."""
        return self.like if not self.difference else None


class ForeignCell(Frozen):
    """One step of a foreign benchmark."""

    name: str  # as our cells are called, where it has a concurrency or a rate
    settings: dict[str, str]
    numbers: list[ForeignNumber]


class ForeignRun(Frozen):
    """A file or folder of another program."""

    program: Program
    file: str
    digest: Digest
    cells: list[ForeignCell]


class Rule(NamedTuple):
    """What a number of theirs means in our terms."""

    like: str | None
    unit: str
    difference: str = ""
    factor: float = 1.0


def number_of(name: str, values: Iterable[Any], rule: Rule) -> ForeignNumber | None:
    """A number by its rule; none where there is no number."""
    scaled = [float(value) * rule.factor for value in values if is_number(value)]
    if not scaled:
        return None
    return ForeignNumber(
        name=name, unit=rule.unit, values=scaled, like=rule.like, difference=rule.difference
    )


def is_number(value: Any) -> bool:
    """A number that can be computed with; True is none."""
    try:
        is_one = isinstance(value, int | float) and not isinstance(value, bool)
        return is_one and abs(float(value)) <= _LARGEST
    # an int may have more digits than any float
    except OverflowError:
        return False


def inner(value: Any, name: str) -> dict[str, Any]:
    """An object within an object; an empty one where there is none."""
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def short(value: Any) -> str:
    """A foreign text that can be shown in one line."""
    return plain(str(value)).replace("\n", " ")[:_MOST_TEXT]


def numbers_of(
    values: Mapping[str, Any], rule_of: Callable[[str], Rule | None]
) -> list[ForeignNumber]:
    """Every number of a flat object that a rule knows, in its own order."""
    found = ((name, value, rule_of(name)) for name, value in values.items())
    read = (number_of(name, [value], rule) for name, value, rule in found if rule)
    return [number for number in read if number]


_STATISTIC = re.compile(r"(mean|median|p\d+(?:\.\d+)?)_(\w+)_ms")


def statistic_rule(name: str, like: Mapping[str, tuple[str, str]]) -> Rule | None:
    """`p99_ttft_ms` by what `ttft` is like, and how it differs."""
    match = _STATISTIC.fullmatch(name)
    if match is None or match[2] not in like:
        return None
    metric, difference = like[match[2]]
    return Rule(quantile_of(metric, match[1]), "ms", difference)


def quantile_of(metric: str, statistic: str) -> str | None:
    """`ttft_ms.p99` for a statistic that we compute, too."""
    ours = _QUANTILES.get(statistic)
    return f"{metric}.{ours}" if ours else None


def settings_of(values: Mapping[str, Any], leave: Iterable[str] = ()) -> dict[str, str]:
    """Everything that is one value, as text: what was set, and fields that nobody here knows."""
    left = frozenset(leave)
    settings = {
        short(name): short(f"{value:g}" if isinstance(value, float) else value)
        for name, value in values.items()
        if name not in left and isinstance(value, str | int | float) and value != ""
    }
    return dict(sorted(settings.items())[:_MOST_SETTINGS])


def cell_name(concurrency: Any, rate: Any, fallback: str = "all") -> str:
    """As our own cells are called: c128, r4."""
    if is_number(concurrency) and concurrency:
        return f"c{concurrency:g}"
    if is_number(rate) and rate:
        return f"r{rate:g}"
    return fallback


def merged(cells: Iterable[ForeignCell]) -> list[ForeignCell]:
    """Repeats of one cell as one; cells of one name with other settings get names of their own."""
    kept: dict[str, ForeignCell] = {}
    for cell in cells:
        name, number = cell.name, 2
        while name in kept and kept[name].settings != cell.settings:
            name, number = f"{cell.name}-{number}", number + 1
        before = kept.get(name)
        kept[name] = _joined(before, cell) if before else cell.model_copy(update={"name": name})
    return list(kept.values())


def _joined(one: ForeignCell, other: ForeignCell) -> ForeignCell:
    more = {number.name: number.values for number in other.numbers}
    numbers = [
        n.model_copy(update={"values": [*n.values, *more.pop(n.name, [])]}) for n in one.numbers
    ]
    numbers += [n for n in other.numbers if n.name in more]
    return one.model_copy(update={"numbers": numbers})
