"""When to try again, when to take another route, and when to give up."""

from __future__ import annotations

import threading

from pipeline.errors import Interrupted
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.routes import Body, Lost, NotHere, Route, Router

ATTEMPTS = 6  # in a row without a byte, by one connection
HELD_ATTEMPTS = 20  # of those that a server itself put off
LONGEST_WAIT_S = 30.0


class Tries:
    """One connection's luck so far."""

    def __init__(self, router: Router, stop: threading.Event, first_wait_s: float) -> None:
        self._router, self._stop, self._first_wait_s = router, stop, first_wait_s
        self._failures = self._held = self._turn = 0
        self._route: Route | None = None
        self._said: dict[str, str] = {}  # why, by route

    def open(self, pin: FilePin, start: int, stop: int, first_turn: int = 0) -> Body:
        """The range from the route whose turn it is; raises `Lost`, or the ending of the last."""
        while True:
            route = self._router.pick(pin, first_turn + self._turn)
            self._route = route
            while (hold_s := self._router.hold_s(route)) > 0:
                self._wait(hold_s)
            try:
                return route.open(pin, start, stop)
            except NotHere as nothing:
                self._router.has_no(route, pin, nothing)

    def moved(self) -> None:
        """Bytes came."""
        self._failures = self._held = 0
        self._said.clear()

    def arrived(self) -> None:
        """A whole range came: the first route is as good as any again."""
        self.moved()
        self._turn = 0
        if self._route is not None:
            self._router.delivered(self._route)

    def failed(self, pin: FilePin, lost: Lost) -> None:
        """Wait before the next try, or end."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        route = self._route
        name = route.name if route else "no route"
        self._said.pop(name, None)  # the last comes last
        self._said[name] = str(lost).removeprefix(f"{pin.path}: ")
        if lost.wait_s is not None and route is not None:
            self._held += 1
            self._router.hold(route, lost.wait_s)
            if self._held < HELD_ATTEMPTS:
                return
        self._failures += 1
        if lost.is_stall and route is not None:
            self._router.stalled(route)
        if lost.is_stall or self._failures % 2 == 0:
            self._turn += 1
        if self._failures >= ATTEMPTS or self._held >= HELD_ATTEMPTS:
            rows = [*self._router.reasons(pin), *((w, n) for n, w in self._said.items())]
            why = "; ".join(f"{words} ({name})" for words, name in rows)
            raise lost.ending(f"{pin.path}: {why}") from lost
        self._wait(min(self._first_wait_s * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def _wait(self, wait_s: float) -> None:
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")
