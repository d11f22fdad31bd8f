"""Every value of a JSON document by its place, so that a changed digit can be named.

Places are JSON pointers (RFC 6901): rfc-editor.org/rfc/rfc6901.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from pipeline.core.model import canonical_json

Scalar: TypeAlias = str | int | float | bool | None


class ChangedField(NamedTuple):
    """A place where two documents differ; `missing` on a side where there is none."""

    place: str
    now: str
    then: str


def fields_of(value: Any, place: str = "") -> dict[str, Scalar]:
    """All single values of a document by their places."""
    if not isinstance(value, dict | list) or not value:
        # an empty table, too: the comparison must show that it was emptied
        return {place: str(value) if isinstance(value, dict | list) else value}
    named = value.items() if isinstance(value, dict) else enumerate(value)
    fields: dict[str, Scalar] = {}
    for name, each in named:
        fields |= fields_of(each, f"{place}/{str(name).replace('~', '~0').replace('/', '~1')}")
    return fields


def changed_fields(now: Mapping[str, Scalar], then: Mapping[str, Scalar]) -> list[ChangedField]:
    """Where two documents differ, in the order of the older one."""

    def shown(fields: Mapping[str, Scalar], place: str) -> str:
        return canonical_json(fields[place]).decode()[:200] if place in fields else "missing"

    places = {**then, **now}
    pairs = [ChangedField(place, shown(now, place), shown(then, place)) for place in places]
    # as JSON, in which true is not 1, and 6 is not 6.0
    return [each for each in pairs if each.now != each.then]
