"""Every value of a JSON document by its place, so that a changed digit can be named.

Places are JSON pointers (RFC 6901): rfc-editor.org/rfc/rfc6901. Long lists of plain values, such as
samples of a sensor, are one value: the digest of the list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import Field, StringConstraints

from pipeline.attest.strict import plain
from pipeline.model import canonical_json, sha256_of

Scalar: TypeAlias = str | int | float | bool | None
Pointer = Annotated[str, StringConstraints(pattern=r"^(/[ -~]*)*$", max_length=1000)]
MOST_FIELDS = 200_000
Fields: TypeAlias = Annotated[dict[Pointer, Scalar], Field(max_length=MOST_FIELDS)]
_LONG_LIST = 16
_LONG_TEXT = 1000


class ChangedField(NamedTuple):
    """A place where two documents differ; `missing` on a side where there is none."""

    place: str
    now: str
    then: str


MISSING = "missing"


def fields_of(value: Any) -> dict[str, Scalar]:
    """All single values of a document by their places."""
    return dict(_fields("", value))


def _fields(place: str, value: Any) -> Iterator[tuple[str, Scalar]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _fields(f"{place}/{_escaped(name)}", each)
    elif isinstance(value, list) and value and _is_listed(value):
        for number, each in enumerate(value):
            yield from _fields(f"{place}/{number}", each)
    elif isinstance(value, str):
        text = plain(value)
        yield place, text if len(text) <= _LONG_TEXT else sha256_of(value.encode())
    elif isinstance(value, dict | list):
        # also an empty one: that it was emptied must be seen
        yield place, sha256_of(canonical_json(value))
    else:
        yield place, value


def _is_listed(values: list[Any]) -> bool:
    return len(values) <= _LONG_LIST or any(isinstance(each, dict) for each in values)


def _escaped(name: str) -> str:
    # keys of a statement are plain ASCII
    text = name if name.isascii() and name.isprintable() else ascii(name)[1:-1]
    return text.replace("~", "~0").replace("/", "~1")[:200]


def changed_fields(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> list[ChangedField]:
    """Where two documents differ, in the order of the older one."""
    places = [*then, *(place for place in now if place not in then)]
    return [
        ChangedField(place, _shown(now, place), _shown(then, place))
        for place in places
        if _differs(now, then, place)
    ]


def _differs(now: Mapping[str, Scalar], then: Mapping[str, Scalar], place: str) -> bool:
    if (place in now) != (place in then):
        return True
    one, other = now[place], then[place]
    # True == 1 in Python, and 6 == 6.0
    return one != other or type(one) is not type(other)


def _shown(fields: Mapping[str, Scalar], place: str) -> str:
    return MISSING if place not in fields else str(canonical_json(fields[place]), "utf-8")[:200]
