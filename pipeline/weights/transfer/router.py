"""Which route a file takes next, when to try again, and when to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pipeline.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    Interrupted,
    OfflineMiss,
    PipelineError,
    RevisionMoved,
)
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.routes import (
    AttemptFailed,
    ByteStream,
    NotAvailable,
    Route,
    not_offline,
)

# After two stalls in a row one more would cost another stall time (30 s): others are tried first.
STALLS = 2
# Failures in a row without a byte. With the doubling waits from 0.5 s this spans 15 seconds, long
# enough for a restarting proxy and short enough that a user still watches.
ATTEMPTS = 6
# A server that answers 429 or 503 with a Retry-After works and is only busy: it names the waits
# itself, so it gets more of them than one that just fails.
DEFERRED_ATTEMPTS = 20
LONGEST_WAIT_S = 30.0
_LONGEST_DEFER_S = 600.0  # a server that asks for more is as good as down
# Which of several routes' errors helps the user most, first to last.
_MOST_USEFUL = (DigestMismatch, RevisionMoved, HubRefused, HubBroken, OfflineMiss, PipelineError)


class Router:
    """Picks a route for each attempt: in order, stalled ones last, those without the file never."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        self._stalls = dict.fromkeys(range(len(self._routes)), 0)
        self._missing: dict[str, dict[int, NotAvailable]] = {}
        self._deferred_until: dict[int, float] = {}
        self._guard = threading.Lock()

    def pick(self, pin: FilePin, turn: int) -> Route:
        """The route for a file's next attempt; every failed attempt takes the next turn."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            left = [i for i in range(len(self._routes)) if i not in missing]
            # last, not never: where all routes stall, each still gets its turns
            left.sort(key=lambda i: (self._stalls[i] >= STALLS, i))
            if not left:
                raise self._error(pin, missing)
            return self._routes[left[turn % len(left)]]

    def _error(self, pin: FilePin, missing: dict[int, NotAvailable]) -> PipelineError:
        """The most useful error, with the other routes' reasons; among equals the last, the Hub."""
        if not missing:
            return not_offline(f"{pin.path}: is not here, and no server may be asked")
        errors = [nothing.error for nothing in missing.values()]
        first = next(e for kind in _MOST_USEFUL for e in reversed(errors) if isinstance(e, kind))
        others = [row for row in self._reasons(pin, missing) if not str(first).endswith(row[0])]
        if not others:
            return first
        more = "; ".join(f"{reason} ({name})" for reason, name in others)
        return type(first)(f"{first}; {more}", first.hint)

    def _reasons(self, pin: FilePin, missing: dict[int, NotAvailable]) -> list[tuple[str, str]]:
        rows = ((str(n.error).removeprefix(f"{pin.path}: "), i) for i, n in missing.items())
        return [(reason, self._routes[i].name) for reason, i in rows]

    def reasons(self, pin: FilePin) -> list[tuple[str, str]]:
        """Why routes do not deliver a file, each with the route's name."""
        with self._guard:
            return self._reasons(pin, self._missing.get(pin.want, {}))

    def mark_missing(self, route: Route, pin: FilePin, nothing: NotAvailable) -> None:
        """Never ask this route for this file again."""
        with self._guard:
            self._missing.setdefault(pin.want, {})[self._routes.index(route)] = nothing

    def lacks_only(self, pin: FilePin) -> bool:
        """Whether no route has this one file, for reasons that do not concern other files."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            everywhere = 0 < len(missing) == len(self._routes)
            return everywhere and all(n.only_this_file for n in missing.values())

    def stalled(self, route: Route) -> None:
        with self._guard:
            self._stalls[self._routes.index(route)] += 1

    def delivered(self, route: Route) -> None:
        with self._guard:
            self._stalls[self._routes.index(route)] = 0

    def defer(self, route: Route, wait_s: float) -> None:
        """A server asked for a pause: no connection asks it before."""
        until = time.monotonic() + min(wait_s, _LONGEST_DEFER_S)
        with self._guard:
            at = self._routes.index(route)
            self._deferred_until[at] = max(until, self._deferred_until.get(at, 0.0))

    def wait_left_s(self, route: Route) -> float:
        """How long a route is still to be left alone."""
        with self._guard:
            return self._deferred_until.get(self._routes.index(route), 0.0) - time.monotonic()


class Attempts:
    """One connection's attempts: which route, how many failed in a row, and why."""

    def __init__(self, router: Router, stop: threading.Event, first_wait_s: float) -> None:
        self._router, self._stop, self._first_wait_s = router, stop, first_wait_s
        self._failures = self._deferred = self._turn = 0
        self._route: Route | None = None
        self._reasons: dict[str, str] = {}  # by route

    def open(self, pin: FilePin, start: int, stop: int, first_turn: int = 0) -> ByteStream:
        """The range from the route whose turn it is; raises `AttemptFailed`, or the last error."""
        while True:
            route = self._router.pick(pin, first_turn + self._turn)
            self._route = route
            while (wait_s := self._router.wait_left_s(route)) > 0:
                self._wait(wait_s)
            try:
                return route.open(pin, start, stop)
            except NotAvailable as nothing:
                self._router.mark_missing(route, pin, nothing)

    def received(self) -> None:
        """Bytes came: the failures before them no longer count."""
        self._failures = self._deferred = 0
        self._reasons.clear()

    def completed(self) -> None:
        """A whole range came: the first route is as good as any again."""
        self.received()
        self._turn = 0
        if self._route is not None:
            self._router.delivered(self._route)

    def failed(self, pin: FilePin, failure: AttemptFailed) -> None:
        """Wait before the next attempt, or raise the final error."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        route = self._route
        name = route.name if route else "no route"
        self._reasons.pop(name, None)  # the latest comes last
        self._reasons[name] = str(failure).removeprefix(f"{pin.path}: ")
        if failure.wait_s is not None and route is not None:
            self._deferred += 1
            self._router.defer(route, failure.wait_s)
            if self._deferred < DEFERRED_ATTEMPTS:
                return
        self._failures += 1
        if failure.is_stall and route is not None:
            self._router.stalled(route)
        # a stall has cost much time already; a quick failure may pass, so its route gets two tries
        if failure.is_stall or self._failures % 2 == 0:
            self._turn += 1
        if self._failures >= ATTEMPTS or self._deferred >= DEFERRED_ATTEMPTS:
            rows = [*self._router.reasons(pin), *((why, n) for n, why in self._reasons.items())]
            reasons = "; ".join(f"{why} ({name})" for why, name in rows)
            raise failure.error_type(f"{pin.path}: {reasons}") from failure
        self._wait(min(self._first_wait_s * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def _wait(self, wait_s: float) -> None:
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")
