"""JSON that anybody may have written: one meaning for every reader, and read in linear time."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from functools import cache
from typing import Any

# Python's own parser calls itself for each level, and ends with a RecursionError
MOST_DEPTH = 48
# Readers in Go, Rust or C hold 64 bits: beyond that they disagree on the number.
_LARGEST_INT = 2**63
# int() takes quadratic time
_MOST_DIGITS = 1000
# Strings and brackets; a string that never ends is taken whole, so that this stays linear.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.S)
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonInvalid(ValueError):
    """Something that is no JSON, or that two readers would read in two ways."""


def read_json(
    data: bytes,
    *,
    most_bytes: int,
    most_depth: int = MOST_DEPTH,
    any_int: bool = False,
    no_number_is_null: bool = False,
) -> Any:
    """A JSON value that every reader understands alike, or an error with the reason.

    `any_int` is for texts whose numbers are not used: some models have 10**30 in their settings.
    `no_number_is_null` is for programs that write NaN or Infinity, as Python's json does.
    """
    if len(data) > most_bytes:
        raise JsonInvalid(f"larger than {most_bytes} bytes")
    # RFC 8259 forbids it, and readers differ in what they do with it: rfc-editor.org/rfc/rfc8259
    if data.startswith(b"\xef\xbb\xbf"):
        raise JsonInvalid("begins with a byte order mark")
    # depth is refused before the parser meets it; few brackets cannot be deep
    if data.count(b"[") + data.count(b"{") > most_depth:
        depth = 0
        for token in _TOKEN.finditer(data):
            depth += token[0] in (b"[", b"{")
            depth -= token[0] in (b"]", b"}")
            if depth > most_depth:
                raise JsonInvalid(f"more than {most_depth} levels deep")
    try:
        value = _decoder(any_int, no_number_is_null).decode(data.decode("utf-8"))
        if _HALF_CHARACTER.search(data):
            # half of a pair of surrogates cannot be written again
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise JsonInvalid("is not UTF-8") from error
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise JsonInvalid(f"holds U+{half:04X}, which is half a character") from error
    except json.JSONDecodeError as error:
        raise JsonInvalid(f"is not JSON ({error.msg} at {error.pos})") from error
    return value


def value_at(value: Any, *path: str | int) -> Any:
    """Finds the value at a path in foreign JSON; none where there is no such path."""
    for step in path:
        if not isinstance(value, dict | list):
            return None
        try:
            value = value[step]  # type: ignore[index]
        except (LookupError, TypeError):
            return None
    return value


@cache
def _decoder(any_int: bool, no_number_is_null: bool) -> json.JSONDecoder:
    """Keeps one of each kind: making one takes longer than reading one of a stream's values."""

    def constant(text: str) -> None:
        # Python reads NaN and Infinity, which JSON does not have
        if not no_number_is_null:
            raise JsonInvalid(f"{text} is not a number")

    def whole(text: str) -> int:
        if len(text) > (_MOST_DIGITS if any_int else 20):
            raise JsonInvalid(f"{text[:20]} is too large a number")
        number = int(text)
        if not any_int and abs(number) >= _LARGEST_INT:
            raise JsonInvalid(f"{text[:20]} is too large a number")
        return number

    return json.JSONDecoder(
        object_pairs_hook=_unique,
        parse_constant=constant,
        parse_float=_finite,
        parse_int=whole,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    # some readers take the first, some the last: a signature over it would mean two things
    counts = Counter(key for key, _ in pairs)
    doubled = next(key for key, times in counts.items() if times > 1)
    raise JsonInvalid(f"the key {doubled[:40]!r} appears twice")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonInvalid(f"{text[:20]} is too large a number")
    return value
