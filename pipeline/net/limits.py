"""How long and how much: bounds that every exchange has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Of one client; tests make them short."""

    connect_s: float = 15.0
    silence_s: float = 60.0  # between two bytes
    head_s: float = 120.0  # from the last byte sent to the end of the headers
    piece_s: float = 120.0  # for each piece of a large body, whatever drips in between
    # of an answer that is read whole: so long it may take however small it is …
    grace_s: float = 60.0
    # … and longer only while it comes at least this fast
    least_bytes_per_s: float = 8192.0
    most_hops: int = 10
    pages_s: float = 900.0  # of a list with all of its pages
