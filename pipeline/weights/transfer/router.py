"""Sources of a file's bytes: which one is asked next, when to try again, and when to give up.

Nothing that a source delivers is trusted: the hash in the lock decides.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.core.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    Interrupted,
    OfflineMiss,
    PipelineError,
    RevisionMoved,
    SourceUnreachable,
)
from pipeline.weights.model import FilePin

NEIGHBOUR_TOKEN = "SM120_NEIGHBOUR_TOKEN"  # noqa: S105 - the variable's name
NEIGHBOUR_LOGIN = f"Set {NEIGHBOUR_TOKEN} to a token that the machine named with --from accepts."
# Failures in a row without a byte. With the doubling waits from 0.5 s this spans 15 seconds, long
# enough for a restarting proxy and short enough that a user still watches.
ATTEMPTS = 6
# A server that answers 429 or 503 with a Retry-After works and is only busy: it names the waits
# itself, so it gets more of them than one that just fails.
DEFERRED_ATTEMPTS = 20
LONGEST_WAIT_S = 30.0
# A source that failed so often in a row, over all connections, is asked after the others until it
# delivers: a machine that was switched off must not cost every range two attempts and their waits.
FAILURES = 4
_STALL = 2  # a stall counts as so many failures, for it has cost 30 s
_LONGEST_DEFER_S = 600.0  # a server that asks for more, at once or in all, is as good as down
# Answers that no sound server gives (another range, another length) are seldom a transfer fault:
# a source of so many for one file, over all connections, is not asked for it again.
WRONG_ANSWERS = 3
# Which of several routes' errors helps the user most, first to last.
_MOST_USEFUL = (DigestMismatch, RevisionMoved, HubRefused, HubBroken, OfflineMiss, PipelineError)


@dataclass
class ByteStream:
    """The bytes of a range, as they arrive from a source."""

    what: str  # is read, for messages
    read: Callable[[memoryview], int]  # into a buffer; 0 at the end
    close: Callable[[], None]
    n_bytes: int  # still to come
    is_whole: bool = False  # the server ignored the range and sends the whole file

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or as much of it as the range still has; raises `AttemptFailed`."""
        count = self.read(buffer[: self.n_bytes])
        if not count:
            raise AttemptFailed(f"{self.what} ended {self.n_bytes} bytes early")
        self.n_bytes -= count
        return count


class Route(Protocol):
    """One source of a locked set's files. `is_shared`: named by the user, as others may be."""

    name: str
    is_shared: bool

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        """The bytes from `start` up to `stop`; raises `AttemptFailed` or `NotAvailable`."""
        ...


@dataclass(eq=False)
class AttemptFailed(Exception):
    """Another attempt or another route may succeed; `error_type` is raised if none does."""

    reason: str
    is_stall: bool = field(default=False, kw_only=True)
    is_unreached: bool = field(default=False, kw_only=True)
    wait_s: float | None = field(default=None, kw_only=True)  # as the server asks
    # of an answer that no sound server gives
    error_type: Callable[[str], PipelineError] | None = field(default=None, kw_only=True)


@dataclass(eq=False)
class NotAvailable(Exception):
    """This route will never deliver this file; `error` is raised if no other route does."""

    error: PipelineError
    only_this_file: bool = field(default=False, kw_only=True)  # as a 404: other files may come
    wants_login: bool = field(default=False, kw_only=True)  # a neighbour wants another token


def not_delivered(message: str) -> SourceUnreachable:
    """No source could be asked, or none of them sent the file."""
    return SourceUnreachable(
        message,
        "Check the network, HF_ENDPOINT and what --from names, then run it again: finished files"
        " are kept.",
    )


def wrong_bytes(message: str) -> DigestMismatch:
    """A source has other bytes than the lock names."""
    return DigestMismatch(
        message,
        "Nothing wrong was kept. Try another --from or HF_ENDPOINT; if upstream itself changed,"
        " `sm120 weights lock NAME --dry-run` shows it.",
    )


def not_offline(message: str) -> OfflineMiss:
    """A file that cannot be had without asking a server."""
    return OfflineMiss(message, "Run without --offline, or name a folder that has it with --from.")


class Router:
    """Picks a source for each attempt: in their order, those that keep failing last.

    Sources that a user named share the work: a new range goes to the one with the fewest open. A
    file that arrived wrong comes from one source at a time, which shows who has wrong bytes. Such a
    source is not asked again in this run unless no other may have the file.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        self._open, self._failures = Counter[Route](), Counter[Route]()
        self._deferred_until: dict[Route, float] = {}
        self._wrong_answers = Counter[tuple[str, Route]]()
        self._missing: dict[str, dict[Route, NotAvailable]] = {}  # by the file's hash
        self._gave: dict[str, set[Route]] = {}  # who has sent bytes of a file
        self._arrived_wrong: set[str] = set()  # hashes of files
        self._liars: set[Route] = set()  # who sent a wrong file
        self._guard = threading.Lock()

    def pick(self, pin: FilePin, turn: int, first: Route | None = None) -> Route:
        """The route for a file's next attempt; every failed attempt takes the next turn.

        `first` is where the attempts at this range began, if they did.
        """
        with self._guard:
            order = self._order(pin)
            if not order:
                raise self._error(pin)
            if first is None:
                shared = [r for r in order if r.is_shared and not self._keeps_failing(r)]
                first = order[0]
                if pin.want not in self._arrived_wrong and first in shared:
                    first = min(shared, key=lambda r: self._open[r])
            if first in order:
                order = [first, *(r for r in order if r is not first)]
            return order[turn % len(order)]

    def _order(self, pin: FilePin) -> list[Route]:
        """The routes that may have the file, the best first."""
        missing = self._missing.get(pin.want, {})
        able = [r for r in self._routes if r not in missing]
        honest = [r for r in able if r not in self._liars]
        # last, not never: where all routes fail, each still gets its turns
        return sorted(honest or able, key=self._keeps_failing)

    def _keeps_failing(self, route: Route) -> bool:
        return self._failures[route] >= FAILURES

    def names(self, pin: FilePin) -> set[str]:
        """The routes that may have a file."""
        with self._guard:
            return {route.name for route in self._order(pin)}

    def opened(self, route: Route, by: int) -> None:
        """Count a range that is opened (1) or closed (-1) at a route."""
        with self._guard:
            self._open[route] += by

    def gave(self, route: Route, pin: FilePin) -> None:
        """Note that bytes of the file came from this route."""
        with self._guard:
            self._gave.setdefault(pin.want, set()).add(route)

    def arrived_wrong(self, pin: FilePin, *, is_all_new: bool) -> bool:
        """Whether a source is left that has not sent wrong bytes yet."""
        with self._guard:
            gave = self._gave.pop(pin.want, set())
            # of several, or of what an earlier run left, it is not known which was wrong
            if pin.want in self._arrived_wrong or (is_all_new and len(gave) == 1):
                self._liars |= gave
            self._arrived_wrong.add(pin.want)
            return any(route not in self._liars for route in self._order(pin))

    def _error(self, pin: FilePin) -> PipelineError:
        """The most useful error, with the other routes' reasons; among equals the last, the Hub."""
        missing = self._missing.get(pin.want, {})
        if not missing:
            return not_offline(f"{pin.path}: is not here, and no server may be asked")
        every = list(reversed(missing.values()))
        first = next(n for kind in _MOST_USEFUL for n in every if isinstance(n.error, kind))
        text, hint = str(first.error), first.error.hint
        others = [row for row in self._reasons(pin) if not text.endswith(row[0])]
        reasons = [text, *(f"{reason} ({name})" for reason, name in others)]
        error = type(first.error)("; ".join(reasons), hint)
        return error if first.wants_login else self._with_login(error, pin)

    def _reasons(self, pin: FilePin) -> list[tuple[str, str]]:
        """Why routes do not deliver a file, each with the route's name."""
        rows = self._missing.get(pin.want, {}).items()
        return [(str(n.error).removeprefix(f"{pin.path}: "), route.name) for route, n in rows]

    def _with_login(self, error: PipelineError, pin: FilePin) -> PipelineError:
        """An error that also tells how to log in to a neighbour that refused the file."""
        if any(nothing.wants_login for nothing in self._missing.get(pin.want, {}).values()):
            error.hint = f"{error.hint} {NEIGHBOUR_LOGIN}"
        return error

    def final_error(
        self, pin: FilePin, failure: AttemptFailed, reasons: dict[str, str]
    ) -> PipelineError:
        """The error after the last attempt: why each route, by its name, does not deliver."""
        with self._guard:
            rows = [*self._reasons(pin), *((why, name) for name, why in reasons.items())]
            texts = "; ".join(f"{why} ({name})" for why, name in rows)
            error_type = failure.error_type or not_delivered
            return self._with_login(error_type(f"{pin.path}: {texts}"), pin)

    def mark_missing(self, route: Route, pin: FilePin, nothing: NotAvailable) -> None:
        """Never ask this route for this file again."""
        with self._guard:
            self._missing.setdefault(pin.want, {})[route] = nothing

    def answered_wrong(self, route: Route, pin: FilePin) -> bool:
        """Count an answer that no sound server gives; whether that was one too many."""
        with self._guard:
            self._wrong_answers[pin.want, route] += 1
            return self._wrong_answers[pin.want, route] >= WRONG_ANSWERS

    def lacks_only(self, pin: FilePin) -> bool:
        """Whether no route has this one file, for reasons that do not concern other files."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            everywhere = 0 < len(missing) == len(self._routes)
            return everywhere and all(n.only_this_file for n in missing.values())

    def failed(self, route: Route, *, is_stall: bool = False) -> None:
        """Count an attempt that stalled, or ended without a byte."""
        with self._guard:
            self._failures[route] += _STALL if is_stall else 1

    def delivered(self, route: Route) -> None:
        """A range came whole: earlier failures no longer count."""
        with self._guard:
            self._failures[route] = 0

    def defer(self, route: Route, wait_s: float) -> None:
        """A server asked for a pause: no connection asks it before."""
        until = time.monotonic() + min(wait_s, _LONGEST_DEFER_S)
        with self._guard:
            earlier = self._deferred_until.get(route, 0.0)
            self._deferred_until[route] = max(until, earlier)

    def wait_left_s(self, route: Route) -> float:
        """How much of a pause that a route asked for is left."""
        with self._guard:
            return self._deferred_until.get(route, 0.0) - time.monotonic()


class Attempts:
    """One connection's attempts: which route, how many failed in a row, and why."""

    def __init__(self, router: Router, stop: threading.Event, first_wait_s: float) -> None:
        self._router, self._stop, self._first_wait_s = router, stop, first_wait_s
        self._turn = 0
        self._route: Route | None = None
        self._first: Route | None = None  # where the attempts at this range began
        self._has_bytes = False
        self._forget_failures()

    def _forget_failures(self) -> None:
        self._failures = self._deferred = self._unreached = 0
        self._deferred_s = 0.0
        self._reasons: dict[str, str] = {}  # by route

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        """The range from the route whose turn it is; raises `AttemptFailed`, or the last error."""
        while True:
            self._release()
            route = self._router.pick(pin, self._turn, self._first if self._turn else None)
            self._first = self._first if self._turn else route
            self._route, self._has_bytes = route, False
            self._router.opened(route, 1)
            while (wait_s := self._router.wait_left_s(route)) > 0:
                self._wait(wait_s)
            try:
                return route.open(pin, start, stop)
            except NotAvailable as nothing:
                self._router.mark_missing(route, pin, nothing)

    def _release(self) -> None:
        if self._route is not None:
            self._router.opened(self._route, -1)
        self._route = None

    def received(self, pin: FilePin) -> None:
        """Bytes came: the failures before them no longer count."""
        if not self._has_bytes and self._route is not None:
            self._forget_failures()
            self._router.gave(self._route, pin)
            self._has_bytes = True

    def completed(self) -> None:
        """A whole range came: the first route is as good as any again."""
        self._forget_failures()
        self._turn = 0
        if self._route is not None:
            self._router.delivered(self._route)
        self._release()

    def failed(self, pin: FilePin, failure: AttemptFailed) -> None:
        """Wait before the next attempt, or raise the final error."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        route = self._route
        assert route is not None, "an attempt fails at a route"
        self._reasons.pop(route.name, None)  # the latest comes last
        self._reasons[route.name] = str(failure).removeprefix(f"{pin.path}: ")
        if failure.wait_s is not None:
            self._deferred += 1
            self._deferred_s += failure.wait_s
            if self._deferred_s <= _LONGEST_DEFER_S:
                self._router.defer(route, failure.wait_s)
                if self._deferred < DEFERRED_ATTEMPTS:
                    return
        if failure.error_type is not None and self._router.answered_wrong(route, pin):
            error = failure.error_type(str(failure))
            nothing = NotAvailable(error, only_this_file=isinstance(error, DigestMismatch))
            return self._router.mark_missing(route, pin, nothing)
        self._failures += 1
        self._unreached = self._unreached + 1 if failure.is_unreached else 0
        if failure.is_stall or not self._has_bytes:
            self._router.failed(route, is_stall=failure.is_stall)
        # a stall has cost much time already; a quick failure may pass, so its route gets two tries
        if failure.is_stall or failure.is_unreached or self._failures % 2 == 0:
            self._turn += 1
        # no source was reached in a whole round: no network, or a mistyped name; what other
        # connections find out changes the order, so that a round may leave one out
        able = self._router.names(pin)
        is_cut_off = self._unreached > len(able) and able <= self._reasons.keys()
        if is_cut_off or self._failures >= ATTEMPTS or self._deferred >= DEFERRED_ATTEMPTS:
            raise self._router.final_error(pin, failure, self._reasons) from failure
        self._wait(min(self._first_wait_s * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def _wait(self, wait_s: float) -> None:
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")
