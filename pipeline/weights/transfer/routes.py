"""Ways to a file's bytes: a route opens any range of a locked file, and says when it cannot.

A route proposes bytes; the lock judges them. `Lost` may pass on another try or another route,
`NotHere` will not pass on this one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from pipeline.errors import (
    DigestMismatch,
    HubBroken,
    HubRefused,
    OfflineMiss,
    PipelineError,
    RevisionMoved,
    SourceUnreachable,
)
from pipeline.weights.model import FilePin, WeightsLock

STRIKES = 2  # so often in a row without a byte, and a route is asked last
_LONGEST_HOLD_S = 600.0
_TELLING = (DigestMismatch, RevisionMoved, HubRefused, HubBroken, OfflineMiss, PipelineError)


class Body(Protocol):
    """Bytes that arrive; `is_whole` when they begin at the file's first byte unasked."""

    is_whole: bool

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer, or as much of it as the range still has; raises `Lost`."""
        ...

    def close(self) -> None: ...


class Route(Protocol):
    """One way to a locked set's files."""

    name: str

    def open(self, pin: FilePin, start: int, stop: int) -> Body:
        """The bytes from `start` up to before `stop`; raises `Lost` or `NotHere`."""
        ...


class Lost(Exception):
    """A try that failed; another one may not. `ending` is how it ends if none does."""

    def __init__(
        self,
        why: str,
        *,
        is_stall: bool = False,
        wait_s: float | None = None,
        ending: Callable[[str], PipelineError] = SourceUnreachable,
    ) -> None:
        super().__init__(why)
        self.is_stall, self.wait_s, self.ending = is_stall, wait_s, ending


class NotHere(Exception):
    """This route will not deliver this file; `ending` is what to say if none does.

    `only_this` where the reason is the file's own, like a 404, and others may still come.
    """

    def __init__(self, ending: PipelineError, *, only_this: bool = False) -> None:
        super().__init__(str(ending))
        self.ending, self.only_this = ending, only_this


class Router:
    """Which route a file takes next: in order, those that stalled last, those without it never."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = list(routes)
        self._strikes = dict.fromkeys(range(len(self._routes)), 0)
        self._absent: dict[str, dict[int, NotHere]] = {}
        self._held_until: dict[int, float] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._routes)

    def pick(self, pin: FilePin, turn: int) -> Route:
        """The route for a file's next try; every failed try takes the next turn."""
        with self._guard:
            absent = self._absent.get(pin.want, {})
            left = [i for i in range(len(self._routes)) if i not in absent]
            left.sort(key=lambda i: (self._strikes[i] >= STRIKES, i))
            if not left:
                raise self._ending(pin, absent)
            return self._routes[left[turn % len(left)]]

    def _ending(self, pin: FilePin, absent: dict[int, NotHere]) -> PipelineError:
        """The most telling reason, then the others; among equals the last, as the Hub is."""
        if not absent:
            return _offline(f"{pin.path}: is not here, and no server may be asked")
        endings = [nothing.ending for nothing in absent.values()]
        first = next(e for kind in _TELLING for e in reversed(endings) if isinstance(e, kind))
        others = [why for why in self._reasons(pin, absent) if not str(first).endswith(why[0])]
        if not others:
            return first
        more = "; ".join(f"{words} ({name})" for words, name in others)
        return type(first)(f"{first}; {more}", first.hint)

    def _reasons(self, pin: FilePin, absent: dict[int, NotHere]) -> list[tuple[str, str]]:
        rows = ((str(n.ending).removeprefix(f"{pin.path}: "), i) for i, n in absent.items())
        return [(words, self._routes[i].name) for words, i in rows]

    def reasons(self, pin: FilePin) -> list[tuple[str, str]]:
        """Why routes do not deliver a file, each with the route's name."""
        with self._guard:
            return self._reasons(pin, self._absent.get(pin.want, {}))

    def has_no(self, route: Route, pin: FilePin, nothing: NotHere) -> None:
        """Never ask this route for this file again."""
        with self._guard:
            self._absent.setdefault(pin.want, {})[self._routes.index(route)] = nothing

    def lacks_only(self, pin: FilePin) -> bool:
        """Whether no route has this one file, for reasons that say nothing of other files."""
        with self._guard:
            absent = self._absent.get(pin.want, {})
            everywhere = 0 < len(absent) == len(self._routes)
            return everywhere and all(n.only_this for n in absent.values())

    def stalled(self, route: Route) -> None:
        with self._guard:
            self._strikes[self._routes.index(route)] += 1

    def delivered(self, route: Route) -> None:
        with self._guard:
            self._strikes[self._routes.index(route)] = 0

    def hold(self, route: Route, wait_s: float) -> None:
        """A server asked for a pause: nobody asks it before."""
        until = time.monotonic() + min(wait_s, _LONGEST_HOLD_S)
        with self._guard:
            at = self._routes.index(route)
            self._held_until[at] = max(until, self._held_until.get(at, 0.0))

    def hold_s(self, route: Route) -> float:
        """How long a route is to be left alone."""
        with self._guard:
            return self._held_until.get(self._routes.index(route), 0.0) - time.monotonic()


class FolderRoute:
    """A folder that may hold the files: by their paths, or as the Hub's cache does."""

    def __init__(self, folder: Path, lock: WeightsLock) -> None:
        self.name = str(folder)
        cache = folder / f"models--{lock.repository.replace('/', '--')}"
        self._roots = (folder, folder / "snapshots" / lock.commit)
        self._blobs = (folder / "blobs", cache / "blobs")

    def open(self, pin: FilePin, start: int, stop: int) -> Body:
        for path in (*(r / pin.path for r in self._roots), *(b / pin.want for b in self._blobs)):
            try:
                if path.is_file() and path.stat().st_size == pin.size_bytes:
                    return _FileBody(path.open("rb"), start, stop)
            except OSError:
                continue
        raise NotHere(_offline(f"{pin.path}: is not in {self.name}"), only_this=True)


def wrong_bytes(words: str) -> DigestMismatch:
    """What a lock says of bytes that are not its own."""
    return DigestMismatch(
        words,
        "Nothing wrong was kept. Try another --from or HF_ENDPOINT; if upstream itself changed,"
        " `sm120 weights lock NAME --diff` shows it.",
    )


def _offline(words: str) -> OfflineMiss:
    return OfflineMiss(words, "Run without --offline, or name a folder that has it with --from.")


class _FileBody:
    is_whole = False

    def __init__(self, handle: BinaryIO, start: int, stop: int) -> None:
        self._handle, self._left = handle, stop - start
        handle.seek(start)

    def readinto(self, buffer: memoryview) -> int:
        try:
            count: int = self._handle.readinto(buffer[: self._left])  # type: ignore[attr-defined]
        except OSError as error:
            raise Lost(f"{self._handle.name}: {error.strerror}") from error
        if not count:
            raise Lost(f"{self._handle.name}: became shorter")
        self._left -= count
        return count

    def close(self) -> None:
        self._handle.close()
