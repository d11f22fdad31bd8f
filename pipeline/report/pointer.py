"""Places in JSON (RFC 6901), by which a page's numbers are taken from its data and compared."""

from __future__ import annotations

from typing import Any


def step(pointer: str, key: str | int) -> str:
    """One level deeper."""
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def look_up(value: Any, pointer: str) -> Any:
    """What is there; a KeyError where nothing is."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (LookupError, ValueError, TypeError):
            raise KeyError(pointer) from None
    return value


def differences(want: Any, got: Any, pointer: str = "") -> list[tuple[str, Any, Any]]:
    """Every place where two values of JSON differ, with both."""
    if isinstance(want, dict) and isinstance(got, dict):
        keys = sorted(want.keys() | got.keys())
        pairs = [(step(pointer, key), want.get(key), got.get(key)) for key in keys]
    elif isinstance(want, list) and isinstance(got, list) and len(want) == len(got):
        both = zip(want, got, strict=True)
        pairs = [(step(pointer, i), *pair) for i, pair in enumerate(both)]
    else:
        # 5 and 5.0 are one number of JSON, true is none
        same = want == got and isinstance(want, bool) == isinstance(got, bool)
        return [] if same else [(pointer, want, got)]
    return [each for at, a, b in pairs for each in differences(a, b, at)]
