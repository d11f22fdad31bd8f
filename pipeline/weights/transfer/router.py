"""Which route a file takes next, when to try again, and when to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

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
    NEIGHBOUR_LOGIN,
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
# A source that failed so often in a row, over all connections, is asked after the others for a
# while: a machine that was switched off must not cost every range two attempts and their waits.
FAILURES = 4
REST_S = 60.0
# One wrong file may be a fault on the way; a source of several is asked after the others.
LIES = 2
_MEASURED_BYTES = 1 << 20  # of a smaller range the time is mostly that of asking
_LONGEST_DEFER_S = 600.0  # a server that asks for more, at once or in all, is as good as down
# Answers that no sound server gives (another range, another length) are seldom a fault on the way:
# a source of so many for one file, over all connections, is not asked for it again.
WRONG_ANSWERS = 3
# Which of several routes' errors helps the user most, first to last.
_MOST_USEFUL = (DigestMismatch, RevisionMoved, HubRefused, HubBroken, OfflineMiss, PipelineError)


class Router:
    """Picks a route for each attempt: in order, those that fail or lie last, without a file never.

    Sources that a user named work together: a new range goes to the one that has the fewest open
    for its speed. A file that arrived wrong comes from one at a time: that shows which one lies.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        every = range(len(self._routes))
        self._stalls, self._failures = dict.fromkeys(every, 0), dict.fromkeys(every, 0)
        self._lies, self._open = dict.fromkeys(every, 0), dict.fromkeys(every, 0)
        self._rests_until, self._rates = dict.fromkeys(every, 0.0), dict.fromkeys(every, 0.0)
        self._missing: dict[str, dict[int, NotAvailable]] = {}
        self._gave: dict[str, set[int]] = {}  # who has sent bytes of a file
        self._wrong: dict[str, set[int]] = {}  # who had a part in a file that arrived wrong
        self._suspects: dict[str, set[int]] = {}  # and who sent it alone
        self._deferred_until: dict[int, float] = {}
        self._wrong_answers: dict[tuple[str, int], int] = {}
        self._guard = threading.Lock()

    def pick(self, pin: FilePin, turn: int, first: Route | None = None) -> Route:
        """The route for a file's next attempt; every failed attempt takes the next turn.

        `first` is where the attempts at this range began, if they did.
        """
        with self._guard:
            order = self._order(pin)
            if not order:
                raise self._error(pin, self._missing.get(pin.want, {}))
            begun = self._routes.index(first) if first else self._least_used(pin, order)
            if begun in order:
                order = [begun, *(i for i in order if i != begun)]
            return self._routes[order[turn % len(order)]]

    def _order(self, pin: FilePin) -> list[int]:
        """Who may have the file, the best first."""
        missing, suspects = self._missing.get(pin.want, {}), self._suspects.get(pin.want, set())
        left = [i for i in range(len(self._routes)) if i not in missing]
        # last, not never: where all routes stall, each still gets its turns
        return sorted(left, key=lambda i: (i in suspects, self._is_poor(i), i))

    def _is_poor(self, at: int) -> bool:
        rests = self._rests_until[at] > time.monotonic()
        return rests or self._stalls[at] >= STALLS or self._lies[at] >= LIES

    def _least_used(self, pin: FilePin, order: list[int]) -> int:
        shared = [i for i in order if self._routes[i].is_shared and not self._is_poor(i)]
        if pin.want in self._wrong or order[0] not in shared:
            return order[0]
        # one that was not measured yet may be as fast as the fastest
        fastest = max(self._rates.values()) or 1.0
        return min(shared, key=lambda i: ((self._open[i] + 1) / (self._rates[i] or fastest), i))

    def names(self, pin: FilePin) -> set[str]:
        """The routes that may have a file."""
        with self._guard:
            return {self._routes[i].name for i in self._order(pin)}

    def opened(self, route: Route, by: int) -> None:
        """One more range is open there, or one less."""
        with self._guard:
            self._open[self._routes.index(route)] += by

    def gave(self, route: Route, pin: FilePin) -> None:
        """Bytes of the file came from there."""
        with self._guard:
            self._gave.setdefault(pin.want, set()).add(self._routes.index(route))

    def arrived_right(self, pin: FilePin) -> None:
        """Whoever had a part in it when it was wrong, and has none now, has wrong bytes."""
        with self._guard:
            self._suspects.pop(pin.want, None)
            for at in self._wrong.pop(pin.want, set()) - self._gave.pop(pin.want, set()):
                self._lies[at] += 1

    def arrived_wrong(self, pin: FilePin, *, is_all_new: bool) -> bool:
        """Whether a source is left that the file did not come from alone."""
        with self._guard:
            gave, suspects = self._gave.pop(pin.want, set()), self._suspects.get(pin.want, set())
            is_first, is_news = pin.want not in self._wrong, bool(gave - suspects)
            self._wrong[pin.want] = self._wrong.get(pin.want, set()) | gave
            # of several, or of what an earlier run left, it is not known which was wrong
            if not is_first or (is_all_new and len(gave) == 1):
                suspects = suspects | gave
            self._suspects[pin.want] = suspects
            ruled_out = suspects | self._missing.get(pin.want, {}).keys()
            # no news: those that are left do not deliver, and the others are known
            return (is_first or is_news) and len(ruled_out) < len(self._routes)

    def _error(self, pin: FilePin, missing: dict[int, NotAvailable]) -> PipelineError:
        """The most useful error, with the other routes' reasons; among equals the last, the Hub."""
        if not missing:
            return not_offline(f"{pin.path}: is not here, and no server may be asked")
        errors = [nothing.error for nothing in missing.values()]
        first = next(e for kind in _MOST_USEFUL for e in reversed(errors) if isinstance(e, kind))
        others = [row for row in self._reasons(pin, missing) if not str(first).endswith(row[0])]
        reasons = [str(first), *(f"{reason} ({name})" for reason, name in others)]
        return type(first)("; ".join(reasons), _with_login(first.hint, missing))

    def _reasons(self, pin: FilePin, missing: dict[int, NotAvailable]) -> list[tuple[str, str]]:
        rows = ((str(n.error).removeprefix(f"{pin.path}: "), i) for i, n in missing.items())
        return [(reason, self._routes[i].name) for reason, i in rows]

    def reasons(self, pin: FilePin) -> list[tuple[str, str]]:
        """Why routes do not deliver a file, each with the route's name."""
        with self._guard:
            return self._reasons(pin, self._missing.get(pin.want, {}))

    def with_login(self, hint: str, pin: FilePin) -> str:
        """A hint, and how to log in to a neighbour that refused a file."""
        with self._guard:
            return _with_login(hint, self._missing.get(pin.want, {}))

    def mark_missing(self, route: Route, pin: FilePin, nothing: NotAvailable) -> None:
        """Never ask this route for this file again."""
        with self._guard:
            self._missing.setdefault(pin.want, {})[self._routes.index(route)] = nothing

    def answered_wrong(self, route: Route, pin: FilePin) -> bool:
        """Count an answer that no sound server gives; whether that was one too many."""
        with self._guard:
            key = (pin.want, self._routes.index(route))
            self._wrong_answers[key] = self._wrong_answers.get(key, 0) + 1
            return self._wrong_answers[key] >= WRONG_ANSWERS

    def lacks_only(self, pin: FilePin) -> bool:
        """Whether no route has this one file, for reasons that do not concern other files."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            everywhere = 0 < len(missing) == len(self._routes)
            return everywhere and all(n.only_this_file for n in missing.values())

    def stalled(self, route: Route) -> None:
        with self._guard:
            self._stalls[self._routes.index(route)] += 1

    def failed(self, route: Route) -> None:
        """An attempt ended without a byte."""
        with self._guard:
            at = self._routes.index(route)
            self._failures[at] += 1
            if self._failures[at] >= FAILURES:
                self._rests_until[at] = time.monotonic() + REST_S

    def delivered(self, route: Route, n_bytes: int = 0, seconds: float = 1.0) -> None:
        """A range came whole, in so much time."""
        with self._guard:
            at = self._routes.index(route)
            self._stalls[at] = self._failures[at] = 0
            self._rests_until[at] = 0.0
            if n_bytes >= _MEASURED_BYTES:
                rate = n_bytes / max(seconds, 1e-3)
                # half of it is the latest: lines and disks change while a set comes
                self._rates[at] = (self._rates[at] + rate) / 2 if self._rates[at] else rate

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


def _with_login(hint: str, missing: Mapping[int, NotAvailable]) -> str:
    refused = any(nothing.error.hint == NEIGHBOUR_LOGIN for nothing in missing.values())
    return f"{hint} {NEIGHBOUR_LOGIN}" if refused and hint != NEIGHBOUR_LOGIN else hint


class Attempts:
    """One connection's attempts: which route, how many failed in a row, and why."""

    def __init__(self, router: Router, stop: threading.Event, first_wait_s: float) -> None:
        self._router, self._stop, self._first_wait_s = router, stop, first_wait_s
        self._failures = self._deferred = self._unreached = self._turn = 0
        self._deferred_s = 0.0
        self._route: Route | None = None
        self._first: Route | None = None  # where the attempts at this range began
        self._pin: FilePin | None = None
        self._received, self._opened_s = 0, 0.0
        self._reasons: dict[str, str] = {}  # by route

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        """The range from the route whose turn it is; raises `AttemptFailed`, or the last error."""
        while True:
            self.release()
            route = self._router.pick(pin, self._turn, self._first if self._turn else None)
            self._route, self._pin = route, pin
            self._first = self._first if self._turn else route
            self._router.opened(route, 1)
            while (wait_s := self._router.wait_left_s(route)) > 0:
                self._wait(wait_s)
            self._received, self._opened_s = 0, time.monotonic()
            try:
                return route.open(pin, start, stop)
            except NotAvailable as nothing:
                self._router.mark_missing(route, pin, nothing)

    def release(self) -> None:
        """This connection has no range open any more."""
        if self._route is not None:
            self._router.opened(self._route, -1)
        self._route = None

    def received(self, n_bytes: int) -> None:
        """Bytes came: the failures before them no longer count."""
        self._failures = self._deferred = self._unreached = 0
        self._deferred_s = 0.0
        self._reasons.clear()
        if not self._received and self._route and self._pin:
            self._router.gave(self._route, self._pin)
        self._received += n_bytes

    def completed(self) -> None:
        """A whole range came: the first route is as good as any again."""
        self._failures = self._deferred = self._unreached = self._turn = 0
        self._reasons.clear()
        if self._route is not None:
            seconds = time.monotonic() - self._opened_s
            self._router.delivered(self._route, self._received, seconds)
        self.release()

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
            self._deferred_s += failure.wait_s
            if self._deferred_s <= _LONGEST_DEFER_S:
                self._router.defer(route, failure.wait_s)
                if self._deferred < DEFERRED_ATTEMPTS:
                    return
        if failure.is_wrong and route is not None and self._router.answered_wrong(route, pin):
            error = failure.error_type(str(failure))
            is_of_file = isinstance(error, DigestMismatch)
            nothing = NotAvailable(error, only_this_file=is_of_file)
            return self._router.mark_missing(route, pin, nothing)
        self._failures += 1
        self._unreached = self._unreached + 1 if failure.is_unreached else 0
        if route is not None:
            if failure.is_stall:
                self._router.stalled(route)
            if not self._received:
                self._router.failed(route)
        # a stall has cost much time already; a quick failure may pass, so its route gets two tries
        if failure.is_stall or failure.is_unreached or self._failures % 2 == 0:
            self._turn += 1
        # nobody was there in a whole round: no network, or a mistyped name; what other connections
        # find out changes the order, so that a round may leave one out
        left = self._router.names(pin)
        is_alone = self._unreached > len(left) and left <= self._reasons.keys()
        if is_alone or self._failures >= ATTEMPTS or self._deferred >= DEFERRED_ATTEMPTS:
            rows = [*self._router.reasons(pin), *((why, n) for n, why in self._reasons.items())]
            reasons = "; ".join(f"{why} ({name})" for why, name in rows)
            error = failure.error_type(f"{pin.path}: {reasons}")
            error.hint = self._router.with_login(error.hint, pin)
            raise error from failure
        self._wait(min(self._first_wait_s * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def _wait(self, wait_s: float) -> None:
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")
