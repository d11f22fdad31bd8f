"""Which facts of a host differ from its record; fields that change by themselves are marked so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipeline.errors import FactsUnreadable
from pipeline.files import read_plain
from pipeline.host.facts.model import HostFacts
from pipeline.host.facts.source import MOST_BYTES
from pipeline.known import Unknown
from pipeline.model import Frozen


class Difference(Frozen):
    """A field and how it changed. `lost` was known and is unknown now; `gained` is the opposite."""

    field: str
    kind: Literal["changed", "lost", "gained"]
    before: str
    after: str


def read_facts(path: Path) -> HostFacts:
    """Recorded facts, as `sm120 host facts --json` wrote them."""
    try:
        data = read_plain(path, MOST_BYTES)
        if data is None:
            message = f"{path}: not a file of host facts: it is larger than {MOST_BYTES} bytes"
            raise FactsUnreadable(message)
        return HostFacts.model_validate_json(data)
    except (OSError, ValidationError, RecursionError) as error:
        raise FactsUnreadable(f"{path}: not a file of host facts: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """What is wrong with a file, without the names of our classes."""
    if isinstance(error, OSError):
        return str(error.strerror)
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0]
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return "it is not JSON"
    return f"{'.'.join(map(str, first['loc'])) or 'its contents'}: {first['msg']}"


def compare(before: HostFacts, after: HostFacts) -> list[Difference]:
    """Every field that differs, but for those declared volatile."""
    return list(_model("", before, after))


def _model(path: str, before: Frozen, after: Frozen) -> Iterator[Difference]:
    for name, field in type(before).model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        then, now = getattr(before, name), getattr(after, name)
        if extra.get("volatile") or _is_near(then, now, extra.get("within")):
            continue
        yield from _value(f"{path}{name}", then, now)


def _is_near(before: Any, after: Any, within: Any) -> bool:
    if within is None or isinstance(before, Unknown) or isinstance(after, Unknown):
        return False
    return bool(abs(after - before) <= within * before)


def _value(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if isinstance(before, Unknown) or isinstance(after, Unknown):
        yield from _unknown(path, before, after)
    elif isinstance(before, Frozen) and type(before) is type(after):
        yield from _model(f"{path}.", before, after)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _mapping(path, _keyed(before), _keyed(after))
    elif isinstance(before, dict) and isinstance(after, dict):
        yield from _mapping(path, before, after)
    elif before != after:
        yield Difference(field=path, kind="changed", before=_text(before), after=_text(after))


def _unknown(path: str, before: Any, after: Any) -> Iterator[Difference]:
    # the reason may be worded differently by another version
    if isinstance(before, Unknown) and isinstance(after, Unknown):
        return
    kind: Literal["lost", "gained"] = "lost" if isinstance(after, Unknown) else "gained"
    yield Difference(field=path, kind=kind, before=_text(before), after=_text(after))


def _keyed(values: list[Any]) -> dict[str, Any]:
    """Lists by the name of each entry, so that one more does not change all others."""
    keys = [_key(v, i) for i, v in enumerate(values)]
    # two of one name can only be told apart by their place
    return (
        dict(zip(keys, values, strict=True))
        if len(set(keys)) == len(keys)
        else {str(i): v for i, v in enumerate(values)}
    )


def _key(value: Any, place: int) -> str:
    # cards by their address: an index changes with the number of cards
    if not isinstance(value, Frozen):
        return str(value)
    code = getattr(value, "code", "")
    name = getattr(value, "address", None) or getattr(value, "name", None)
    return f"{code} {name}".strip() if isinstance(name, str) else str(place)


def _mapping(path: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Difference]:
    for key in sorted({*before, *after}):
        where = f"{path}[{key}]"
        if key in before and key in after:
            yield from _value(where, before[key], after[key])
            continue
        old, new = (_text(side[key]) if key in side else "(none)" for side in (before, after))
        yield Difference(field=where, kind="changed", before=old, after=new)


def _text(value: Any) -> str:
    if isinstance(value, Unknown):
        return f"unknown: {value.unknown}"
    if isinstance(value, Frozen):
        return value.model_dump_json()[:200]
    return str(value)[:200]
