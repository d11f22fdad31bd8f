"""How long an exchange may take, when it is tried again, and who ends what is late."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from pipeline.core import log
from pipeline.core.errors import Interrupted
from pipeline.core.net.failures import Lost

Result = TypeVar("Result")

# With waits of 0.5 to 4 s between them, a restart of some seconds is bridged.
ATTEMPTS = 5
# Where no server answers from the beginning: a mistyped name, no network, a server not yet up.
_UNREACHED_ATTEMPTS = 2
LONGEST_WAIT_S = 30.0
# Some servers ask for hours, which no user would take for progress; the Hub counts in windows of
# five minutes.
LONGEST_ASKED_S = 330.0
# of all waits together that servers ask for in one exchange: two windows of the Hub
_MOST_ASKED_S = 2 * LONGEST_ASKED_S
_REPORT_FROM_S = 1.0  # shorter waits are not worth a line


@dataclass(frozen=True)
class HttpLimits:
    """The limits of one client; tests make them short."""

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


_NUMBER = re.compile(r"[0-9]{1,12}")
# the Hub: RateLimit: "api";r=0;t=45 — an older draft: RateLimit: limit=10, remaining=0, reset=45
_LEFT = re.compile(r"(?:^|[;,\s])(?:r|remaining)\s*=\s*([0-9]{1,12})(?![0-9])")
_RESET = re.compile(r"(?:^|[;,\s])(?:t|reset)\s*=\s*([0-9]{1,12})(?![0-9])")
_LONGEST_HEADER = 2000
_EPOCH_FROM = 10**9  # GitHub and others give the moment, not the seconds until then


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a refusing server asks for; the longest where it names several."""
    asked = [retry_after_s(headers.get("Retry-After") or "")]
    for window in re.split(r',(?=\s*")', (headers.get("RateLimit") or "")[:_LONGEST_HEADER]):
        left, reset = _LEFT.search(window), _RESET.search(window)
        # only a window that is used up counts
        if reset and (left is None or int(left[1]) == 0):
            asked.append(float(reset[1]))
    for prefix in ("RateLimit", "X-RateLimit"):
        remaining = (headers.get(f"{prefix}-Remaining") or "").strip()
        until = (headers.get(f"{prefix}-Reset") or "").strip()
        if _NUMBER.fullmatch(until) and remaining in ("", "0"):
            is_moment = float(until) >= _EPOCH_FROM
            asked.append(max(0.0, float(until) - time.time()) if is_moment else float(until))
    return max((s for s in asked if s is not None), default=None)


def retry_after_s(text: str) -> float | None:
    """`Retry-After`: seconds, or a date."""
    if _NUMBER.fullmatch(text.strip()):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text[:100]).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def most_attempts(lost: Lost, attempts: int | None = None) -> int:
    """How often to ask in all, after a failure of this kind."""
    most = attempts or ATTEMPTS
    return min(most, _UNREACHED_ATTEMPTS) if lost.is_unreached else most


class RetryPolicy:
    """How often and after which waits a client tries again; shared by its threads."""

    def __init__(self, stop: threading.Event, first_wait_s: float) -> None:
        self._stop, self._first_wait_s = stop, first_wait_s
        self._guard, self._reported_at = threading.Lock(), 0.0

    def retried(self, ask: Callable[[], Result], attempts: int | None = None) -> Result:
        """What `ask` returns as soon as it is not `Lost`; raises the last `Lost` otherwise."""
        failures, asked_s = 0, 0.0
        while True:
            try:
                return ask()
            except Lost as lost:
                failures += 1
                asked_s += lost.wait_s or 0.0
                # a server that asks for days, or again and again, is as good as down
                if failures >= most_attempts(lost, attempts) or asked_s > _MOST_ASKED_S:
                    raise
                self.pause(failures - 1, lost)

    def pause(self, attempt: int, lost: Lost | None = None) -> None:
        """Waits longer each time, or as long as the server asks; a stop ends it."""
        wait_s = min(self._first_wait_s * 2**attempt, LONGEST_WAIT_S)
        if lost and lost.wait_s is not None:
            wait_s = min(lost.wait_s, LONGEST_ASKED_S)
        if lost and wait_s >= _REPORT_FROM_S:
            # one line for what several threads run into at the same time
            now = time.monotonic()
            with self._guard:
                is_new, self._reported_at = now - self._reported_at >= _REPORT_FROM_S, now
            if is_new:
                log.say(f"  {lost}; trying again in {wait_s:.0f} s")
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")


class Watchdog:
    """Cuts what is not done in time; one thread for all, and none while nothing is watched."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def begin(self, key: int, cut: Callable[[], None], most_s: float) -> None:
        """Begins to watch something, which `cut` ends after so many seconds."""
        until = time.monotonic() + most_s
        with self._news:
            self._watched[key] = (until, cut)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._wakes_at = until
                self._thread.start()
            elif until < self._wakes_at:
                self._news.notify()

    def end(self, key: int) -> bool:
        """Stops watching it; returns whether it ended by itself."""
        with self._news:
            return self._watched.pop(key, None) is not None

    def _look(self) -> None:
        while True:
            with self._news:
                if not self._watched:
                    self._thread = None
                    return
                now = time.monotonic()
                late = [k for k, (until, _) in self._watched.items() if until <= now]
                cuts = [self._watched.pop(key)[1] for key in late]
                if not cuts:
                    self._wakes_at = min(until for until, _ in self._watched.values())
                    self._news.wait(self._wakes_at - now)
            for cut in cuts:
                with suppress(Exception):  # whatever it was, the others are still watched
                    cut()
