"""A bandwidth limit over all connections: tokens that fill up with time."""

from __future__ import annotations

import threading
import time

from pipeline.errors import Interrupted

_BURST_S = 0.25


class Throttle:
    """At most so many bytes a second, together; None is no limit."""

    def __init__(self, bytes_per_s: float | None, stop: threading.Event) -> None:
        self._rate, self._stop = bytes_per_s, stop
        self._free_at = time.monotonic()
        self._guard = threading.Lock()

    def piece_bytes(self, most: int) -> int:
        """How much one may ask for at a time, so that a low limit still flows evenly."""
        return most if self._rate is None else max(1, min(most, int(self._rate * _BURST_S)))

    def take(self, n_bytes: int) -> None:
        """Wait until so many bytes may pass; who comes first is served first."""
        if self._rate is None:
            return
        with self._guard:
            now = time.monotonic()
            # time that nobody used is only saved up to a short burst
            begin = max(self._free_at, now - _BURST_S)
            self._free_at = begin + n_bytes / self._rate
            wait_s = self._free_at - now
        if wait_s > 0 and self._stop.wait(wait_s):
            raise Interrupted("stopped")
