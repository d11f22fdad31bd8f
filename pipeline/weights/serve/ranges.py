"""Which bytes of a file a client wants: one range, or all."""

from __future__ import annotations

import re

_ONE = re.compile(r"(\d{1,18})-(\d{0,18})|-(\d{1,18})")


class Unsatisfiable(Exception):
    """A range that the file does not have, or that is none."""


def wanted_range(header: str, size: int) -> tuple[int, int] | None:
    """First byte and length; None where the whole file is to be sent.

    Several ranges in one request may be answered with the whole file, and so may a unit that is
    not known; a range in bytes that cannot be read is refused, for its author wanted little.
    """
    unit, _, text = header.partition("=")
    if not header or unit.strip().lower() != "bytes" or "," in text:
        return None
    match = _ONE.fullmatch(text.strip())
    if not match:
        raise Unsatisfiable
    if match[3] is not None:
        length = min(int(match[3]), size)
        start, end = size - length, size - 1
    else:
        start = int(match[1])
        end = min(int(match[2]), size - 1) if match[2] else size - 1
        if match[2] and int(match[2]) < start:
            raise Unsatisfiable
    if start >= size or end < start:
        raise Unsatisfiable
    return start, end - start + 1
