"""Which facts of a host differ from its record, but for fields that change by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline.core.known import Unknown
from pipeline.core.model import Frozen
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.source import read_model


class Difference(Frozen):
    """A field and how it changed. `lost` was known and is unknown now; `gained` is the opposite."""

    field: str
    kind: Literal["changed", "lost", "gained"]
    before: str
    after: str


def read_recorded_facts(path: Path) -> HostFacts:
    """Recorded facts, as `sm120 host facts --json` wrote them."""
    return read_model(path, HostFacts, "a file of host facts")


def compare_facts(before: HostFacts, after: HostFacts) -> list[Difference]:
    """List every field that differs, except those declared volatile."""
    return list(_model("", before, after))


def _model(path: str, before: Frozen, after: Frozen) -> Iterator[Difference]:
    for name, field in type(before).model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        old, new, within = getattr(before, name), getattr(after, name), extra.get("within")
        known = not isinstance(old, Unknown) and not isinstance(new, Unknown)
        near = isinstance(within, float) and known and abs(new - old) <= within * old
        if not extra.get("volatile") and not near:
            yield from _value(f"{path}{name}", old, new)


def _value(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        # two reasons may be worded differently by another version
        if type(before) is not type(after):
            kind: Literal["lost", "gained"] = "lost" if isinstance(after, Unknown) else "gained"
            yield Difference(field=path, kind=kind, before=_text(before), after=_text(after))
    elif isinstance(before, Frozen) and type(before) is type(after):
        yield from _model(f"{path}.", before, after)
    elif isinstance(before, (list, dict)) and type(before) is type(after):
        old, new = (x if isinstance(x, dict) else _keyed(x) for x in (before, after))
        for key in sorted({*old, *new}):
            if key in old and key in new:
                yield from _value(f"{path}[{key}]", old[key], new[key])
                continue
            was, now = (_text(side[key]) if key in side else "(none)" for side in (old, new))
            yield Difference(field=f"{path}[{key}]", kind="changed", before=was, after=now)
    elif before != after:
        yield Difference(field=path, kind="changed", before=_text(before), after=_text(after))


def _keyed(values: list[Any]) -> dict[str, Any]:
    """Key a list by its entries' names, so that one more does not change all others."""
    keys = []
    for place, value in enumerate(values):
        # cards by their address: an index changes with the number of cards
        name = getattr(value, "address", None) or getattr(value, "name", None)
        named = f"{getattr(value, 'code', '')} {name}".strip() if isinstance(name, str) else ""
        keys.append((named or str(place)) if isinstance(value, Frozen) else str(value))
    # only their place distinguishes two of one name
    unique = len(set(keys)) == len(keys)
    return dict(zip(keys if unique else map(str, range(len(values))), values, strict=True))


def _text(value: Any) -> str:
    if isinstance(value, Unknown):
        return f"unknown: {value.unknown}"
    # a difference is a row of a table
    if isinstance(value, Frozen):
        return value.model_dump_json()[:200]
    return str(value)[:200]
