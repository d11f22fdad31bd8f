"""Sizes as people write and read them."""

from __future__ import annotations

import re

GIB = 1 << 30
MIB = 1 << 20
_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
MOST_BYTES = 1 << 50  # 1 PiB, more than any machine has
MOST_TOKENS = 1 << 24


def read_card_size(text: str) -> int:
    """A card's memory in bytes: a card that is sold with 96 GB has 96 GiB."""
    size = read_size(text)
    sold = re.fullmatch(r"\s*([\d.]+)\s*GB?\s*", text, re.IGNORECASE)
    return round(float(sold[1]) * GIB) if sold else size


def read_tokens(text: str) -> int:
    """`131072`, `128k` or `1M`, as contexts are called: a k is 1,024 tokens."""
    parts = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", text)
    if parts is None:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 131072 or 128k")
    tokens = int(parts[1]) << {"": 0, "k": 10, "m": 20}[parts[2].lower()]
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{text!r} is not between 1 and {MOST_TOKENS:,} tokens")
    return tokens


def read_size(text: str, *, bare: bool = False) -> int:
    """`96GiB`, `768GB` or `500G` in bytes; a number without a unit only where it may be `bare`."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(parts[2].upper().removesuffix("B") + "B") if parts else None
    # cards are sold in GiB and memory in GB: without a unit either could be meant
    if parts is None or unit is None or not (parts[2] or bare):
        raise ValueError(f"{text!r} is not a size; write it like 96GiB or 768GB")
    size = round(float(parts[1]) * unit)
    if not 0 < size <= MOST_BYTES:
        raise ValueError(f"{text!r} is not a size that a machine has")
    return size


def gib(n_bytes: float) -> str:
    """Two digits, in the unit in which cards are sold and engines log."""
    return f"{n_bytes / GIB:,.2f} GiB"


def share(whole: int, parts: int) -> int:
    """One of equal parts, rounded up."""
    return -(-whole // parts)
