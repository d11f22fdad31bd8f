"""How long a server asks us to wait: `Retry-After`, and the several spellings of `RateLimit`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

_NUMBER = re.compile(r"[0-9]{1,12}")
# the Hub: RateLimit: "api";r=0;t=45 — an older draft: RateLimit: limit=10, remaining=0, reset=45
_LEFT = re.compile(r"(?:^|[;,\s])(?:r|remaining)\s*=\s*([0-9]{1,12})(?![0-9])")
_RESET = re.compile(r"(?:^|[;,\s])(?:t|reset)\s*=\s*([0-9]{1,12})(?![0-9])")
_LONGEST_HEADER = 2000
_EPOCH_FROM = 10**9  # GitHub and others give the moment, not the seconds until then


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a refusing server asks for; the longest of all that it says."""
    asked = (
        retry_after_s(headers.get("Retry-After") or ""),
        _one_field(headers.get("RateLimit") or ""),
        _many_fields(headers, "RateLimit"),
        _many_fields(headers, "X-RateLimit"),
    )
    return max((s for s in asked if s is not None), default=None)


def retry_after_s(text: str) -> float | None:
    """`Retry-After`: seconds, or a date."""
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text[:100]).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _one_field(text: str) -> float | None:
    """The longest reset among the windows that are used up."""
    resets = []
    windows = re.split(r',(?=\s*")', text[:_LONGEST_HEADER])
    for window in windows:
        left, reset = _LEFT.search(window), _RESET.search(window)
        if reset and (left is None or int(left[1]) == 0):
            resets.append(float(reset[1]))
    return max(resets, default=None)


def _many_fields(headers: Mapping[str, str], prefix: str) -> float | None:
    left = (headers.get(f"{prefix}-Remaining") or "").strip()
    reset = (headers.get(f"{prefix}-Reset") or "").strip()
    if not _NUMBER.fullmatch(reset) or left not in ("", "0"):
        return None
    seconds = float(reset)
    return max(0.0, seconds - time.time()) if seconds >= _EPOCH_FROM else seconds
