"""Checked values of a config.json, which comes from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core.errors import ModelUnreadable

Table = Mapping[str, Any]
_MOST = 1 << 24  # of any count in it, so that no sum here becomes absurd
_LONGEST = 60  # of a value in a message


def describe_value(value: object) -> str:
    """Writes a value for a message: short, and with nothing that a terminal would act on."""
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def count_field(table: Table, *keys: str) -> int:
    """The number under the first of several names that models have for it."""
    key = next((k for k in keys if table.get(k) is not None), keys[0])
    value = table.get(key)
    if value is None:
        raise ModelUnreadable(f"{key}: is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST:
        raise ModelUnreadable(f"{key}: {describe_value(value)} is not a count")
    return value


def few(table: Table, *keys: str) -> int:
    """Like `count_field`, but the number may be missing or 0."""
    key = next((k for k in keys if table.get(k)), None)
    return 0 if key is None else count_field(table, key)


def flag_field(table: Table, key: str, *, default: bool = False) -> bool:
    """True or false."""
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise ModelUnreadable(f"{key}: {describe_value(value)} is neither true nor false")
    return value


def names(table: Table, key: str) -> list[str]:
    """A list of words; empty where the field is missing."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ModelUnreadable(f"{key}: is not a list of names")
    return value


def numbers(table: Table, key: str) -> list[int]:
    """A list of numbers; empty where the field is missing."""
    value = table.get(key) or []
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= _MOST for v in value):
        raise ModelUnreadable(f"{key}: is not a list of numbers")
    return value


def table_field(outer: Table, key: str) -> Table:
    """A table inside a table; empty where the field is missing."""
    value = outer.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelUnreadable(f"{key}: is not a JSON object")
    return value
