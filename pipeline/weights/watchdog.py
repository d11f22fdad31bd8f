"""Connections that are alive but bring next to nothing: somebody has to notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Watchdog:
    """Cuts connections that drip: a read that does not fill its buffer in time."""

    def __init__(self, most_s: float, stop: threading.Event) -> None:
        self._most_s, self._stop = most_s, stop
        self._reads: dict[int, tuple[float, Callable[[], None]]] = {}
        self._guard = threading.Lock()
        self._thread: threading.Thread | None = None

    def begin(self, key: int, cut: Callable[[], None]) -> None:
        """A read begins; `cut` would end it."""
        with self._guard:
            self._reads[key] = (time.monotonic(), cut)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()

    def end(self, key: int) -> bool:
        """Whether the read ended by itself."""
        with self._guard:
            return self._reads.pop(key, None) is not None

    def _look(self) -> None:
        while not self._stop.wait(self._most_s / 10):
            with self._guard:
                if not self._reads:
                    self._thread = None
                    return
                now = time.monotonic()
                late = [k for k, (since, _) in self._reads.items() if now - since > self._most_s]
                cuts = [self._reads.pop(key)[1] for key in late]
            for cut in cuts:
                with suppress(OSError, ValueError, RuntimeError):
                    cut()
        self._thread = None
