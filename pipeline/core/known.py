"""A value, or the reason why there is none. Never a zero, an empty text or a guess instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias, TypeVar

from pydantic import Field, StringConstraints

from pipeline.core.model import Frozen


class Unknown(Frozen):
    """In the place of a value: why there is none."""

    unknown: Annotated[str, StringConstraints(min_length=3, max_length=400)]


Value = TypeVar("Value")
Other = TypeVar("Other")
# Reasons first: read back from JSON, a reason must not be taken for a table with one row.
Known: TypeAlias = Annotated[Unknown | Value, Field(union_mode="left_to_right")]


def unknown(why: str) -> Unknown:
    """Makes an Unknown whose reason is one short line."""
    # reasons come from programs, with newlines and of any length
    line = " ".join(why.split())[:400]
    return Unknown(unknown=line if len(line) >= 3 else f"no reason: {line!r}")


def first_unknown(*values: object) -> Unknown | None:
    """The first of the values that is unknown, with its reason; none where all are known."""
    return next((x for x in values if isinstance(x, Unknown)), None)


def then(value: Known[Value], read: Callable[[Value], Known[Other]]) -> Known[Other]:
    """Read on from a value; an unknown one stays unknown, an unreadable one becomes unknown."""
    if isinstance(value, Unknown):
        return value
    try:
        return read(value)
    except KeyError as error:
        return unknown(f"cannot be read: it has no {error}")
    except (ValueError, IndexError, TypeError) as error:
        # not the exception's name: people read reasons in reports, and know no Python
        return unknown(f"cannot be read: {error}")
