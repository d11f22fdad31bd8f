"""Sources of a file's bytes: which one is asked next, when to try again, and when to give up.

It trusts nothing that a source delivers: the hash in the lock decides.
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
_TRIES = 2  # at a source, before the next gets its turn: a quick failure may pass
LONGEST_WAIT_S = 30.0
# A server that answers 429 or 503 with a Retry-After works and is only busy. It names the waits
# itself, and gets so much of them in all; each counts as 30 s at least, so that they end.
_LONGEST_DEFER_S, _LEAST_DEFER_S = 600.0, 30.0
# A source that failed so often in a row, over all connections, is asked after the others until it
# delivers: a machine that was switched off must not cost every range two attempts and their waits.
FAILURES = 4
# Answers that no sound server gives (another range, another length) are seldom a transfer fault:
# after this many for one file, over all connections, no thread asks the source for it again.
WRONG_ANSWERS = 3
_NOT_DELIVERED = (
    "Check the network, HF_ENDPOINT and what --from names, then run it again: finished files are"
    " kept."
)
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

    @property
    def cost(self) -> int:
        """How many tries it counts as: a stall has cost 30 s, and a host that is off stays off."""
        return _TRIES if self.is_stall or self.is_unreached else 1


@dataclass(eq=False)
class NotAvailable(Exception):
    """This route will never deliver this file; `error` is raised if no other route does."""

    error: PipelineError
    only_this_file: bool = field(default=False, kw_only=True)  # as a 404: other files may come
    wants_login: bool = field(default=False, kw_only=True)  # a neighbour wants another token


def wrong_bytes(message: str) -> DigestMismatch:
    """A source has other bytes than the lock names."""
    return DigestMismatch(
        message,
        "Nothing wrong was kept. Try another --from or HF_ENDPOINT; if upstream itself changed,"
        " `sm120 weights lock NAME --dry-run` shows it.",
    )


def not_offline(message: str) -> OfflineMiss:
    """The error for a file that needs a server."""
    return OfflineMiss(message, "Run without --offline, or name a folder that has it with --from.")


class Router:
    """Picks a source for each attempt: in their order, those that keep failing last.

    Sources that a user named share the work: a new range goes to the one with the fewest open. A
    file that arrived wrong comes again from one source after the other; who sent a wrong file
    alone is not asked again in this run unless no other source is left.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = list(routes)
        self._open, self._failures = Counter[Route](), Counter[Route]()
        self.not_before: dict[Route, float] = {}  # until when each server asked us to pause
        self._wrong_answers = Counter[tuple[str, Route]]()
        self._missing: dict[str, dict[Route, NotAvailable]] = {}  # by the file's hash
        self._alone: dict[str, Route] = {}  # which source a file that arrived wrong comes from
        self._liars: set[Route] = set()  # who sent a wrong file
        self._guard = threading.RLock()

    def able(self, pin: FilePin) -> list[Route]:
        """The sources that may have a file."""
        with self._guard:
            able = [r for r in self.routes if r not in self._missing.get(pin.want, {})]
            return [r for r in able if r not in self._liars] or able

    def pick(self, pin: FilePin, tries: Counter[Route]) -> Route:
        """Pick the route for a file's next attempt; call `release` when that is over."""
        with self._guard:
            if not (able := self.able(pin)):
                raise self.error(pin, {})
            alone = self._alone.get(pin.want)
            route = min(
                able,
                key=lambda r: (
                    tries[r] // _TRIES,
                    # last, not never: where all routes fail, each still gets its tries
                    self._failures[r] >= FAILURES,
                    r is not alone,
                    not r.is_shared,
                    self._open[r] if r.is_shared and alone is None else 0,
                ),
            )
            self._open[route] += 1
            return route

    def release(self, route: Route) -> None:
        """End the attempt that `pick` was for."""
        with self._guard:
            self._open[route] -= 1

    def arrived_wrong(self, pin: FilePin) -> bool:
        """Go on to the next source for this file; whether one is left."""
        with self._guard:
            # of the first time it is not known who was wrong: several may have sent ranges of it
            if pin.want in self._alone:
                self._liars.add(self._alone[pin.want])
            honest = [route for route in self.able(pin) if route not in self._liars]
            if honest:
                self._alone[pin.want] = honest[0]
            return bool(honest)

    def error(
        self, pin: FilePin, reasons: dict[str, str], failure: AttemptFailed | None = None
    ) -> PipelineError:
        """Explain why no source delivers a file, after a last failure or with none left."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            if not missing and failure is None:
                return not_offline(f"{pin.path}: is not here, and no server may be asked")
            rows = {route.name: str(nothing.error) for route, nothing in missing.items()}
            rows = {name: why.removeprefix(f"{pin.path}: ") for name, why in rows.items()} | reasons
            text = "; ".join(f"{why} ({name})" for name, why in rows.items())
            error: PipelineError
            has_login_hint = False
            if failure is not None and failure.error_type is not None:
                error = failure.error_type(f"{pin.path}: {text}")
            elif failure is not None:
                error = SourceUnreachable(f"{pin.path}: {text}", _NOT_DELIVERED)
            else:
                # among equals the last, which is the Hub
                every = list(reversed(missing.values()))
                first = next(n for kind in _MOST_USEFUL for n in every if isinstance(n.error, kind))
                message = f"{pin.path}: {text}" if len(rows) > 1 else str(first.error)
                error = type(first.error)(message)
                error.hint, has_login_hint = first.error.hint, first.wants_login
            login = any(nothing.wants_login for nothing in missing.values())
            if login and not has_login_hint:
                error.hint = f"{error.hint} {NEIGHBOUR_LOGIN}"
            return error

    def mark_missing(self, route: Route, pin: FilePin, nothing: NotAvailable) -> None:
        """Never ask this route for this file again."""
        with self._guard:
            self._missing.setdefault(pin.want, {})[route] = nothing

    def lacks_only(self, pin: FilePin) -> bool:
        """Whether every route lacks this file for reasons that concern no other file."""
        with self._guard:
            missing = self._missing.get(pin.want, {})
            everywhere = 0 < len(missing) == len(self.routes)
            return everywhere and all(n.only_this_file for n in missing.values())

    def failed(self, route: Route, pin: FilePin, failure: AttemptFailed) -> bool:
        """Count a failed attempt; return whether to drop this route for the file."""
        with self._guard:
            self._failures[route] += failure.cost
            self._wrong_answers[pin.want, route] += failure.error_type is not None
            if failure.error_type is None or self._wrong_answers[pin.want, route] < WRONG_ANSWERS:
                return False
            error = failure.error_type(str(failure))
            nothing = NotAvailable(error, only_this_file=isinstance(error, DigestMismatch))
            self.mark_missing(route, pin, nothing)
            return True

    def delivered(self, route: Route) -> None:
        """Note that a range came whole: earlier failures no longer count."""
        with self._guard:
            self._failures[route] = 0


class Attempts:
    """One connection's attempts: which route, how many failed in a row, and why."""

    def __init__(self, router: Router, stop: threading.Event, first_wait_s: float) -> None:
        self._router, self._stop, self._first_wait_s = router, stop, first_wait_s
        self._route: Route | None = None
        self.received()

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        """Open the range at the next route; raise `AttemptFailed`, or the last error."""
        while True:
            if self._route is not None:
                self._router.release(self._route)
            self._route = None
            route = self._route = self._router.pick(pin, self._tries)
            while (until := self._router.not_before.get(route, 0.0)) > time.monotonic():
                self._wait(until - time.monotonic())
            try:
                return route.open(pin, start, stop)
            except NotAvailable as nothing:
                self._router.mark_missing(route, pin, nothing)

    def received(self) -> None:
        """Note that bytes came: earlier failures no longer count."""
        self._failures = self._unreached = 0
        self._deferred_s = 0.0
        self._tries = Counter[Route]()
        self._reasons: dict[str, str] = {}  # by route

    def completed(self) -> None:
        """Note that a whole range came: the first route is as good as any again."""
        self.received()
        if self._route is not None:
            self._router.delivered(self._route)

    def failed(self, pin: FilePin, failure: AttemptFailed) -> None:
        """Wait before the next attempt, or raise the final error."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        route = self._route
        assert route is not None, "an attempt fails at a route"
        self._reasons.pop(route.name, None)  # the latest comes last
        self._reasons[route.name] = str(failure).removeprefix(f"{pin.path}: ")
        if failure.wait_s is not None:
            self._deferred_s += max(failure.wait_s, _LEAST_DEFER_S)
            if self._deferred_s <= _LONGEST_DEFER_S:
                until, not_before = time.monotonic() + failure.wait_s, self._router.not_before
                not_before[route] = max(until, not_before.get(route, 0.0))
                return
        if self._router.failed(route, pin, failure):
            return
        self._failures += 1
        self._tries[route] += failure.cost
        self._unreached = self._unreached + 1 if failure.is_unreached else 0
        # no source was reached in a whole round: no network, or a mistyped name
        if self._unreached > len(self._router.able(pin)) or self._failures >= ATTEMPTS:
            raise self._router.error(pin, self._reasons, failure) from failure
        self._wait(min(self._first_wait_s * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def _wait(self, wait_s: float) -> None:
        if self._stop.wait(wait_s):
            raise Interrupted("stopped")
