"""Connections that are alive but bring next to nothing: somebody has to notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Watchdog:
    """Cuts what is not done in time; one thread for all, and none while nothing is watched."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, Callable[[], None]]] = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def begin(self, key: int, cut: Callable[[], None], most_s: float) -> None:
        """Something begins that `cut` would end; it has so many seconds."""
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
        """Whether it ended by itself."""
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
