"""How far a build is, read from ninja's own lines."""

from __future__ import annotations

import re
import time

from pipeline import log

# NINJA_STATUS of ours: finished and total, in brackets that no compiler prints at a line's start.
NINJA_STATUS = "[%f/%t] "
_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")


class NinjaProgress:
    """Turns ninja's lines into one line now and then, with the time that is left."""

    def __init__(self, title: str, every_s: float = log.QUIET_LINE_EVERY_S) -> None:
        self._title, self._every_s = title, every_s
        self._start = self._last = time.monotonic()
        self.done = self.total = 0

    def see(self, line: str) -> None:
        """Take one line of output."""
        match = _STEP.match(line)
        if not match:
            return
        self.done, self.total = int(match[1]), int(match[2])
        now = time.monotonic()
        if now - self._last < self._every_s or not self.done:
            return
        self._last = now
        left = (now - self._start) / self.done * (self.total - self.done)
        log.say(f"  {self._title}: {self.done} of {self.total}, {log.seconds(left)} left")
