"""Threads that transfer ranges: each stays with a file, and helps with another when it is done.

Ranges of a file arrive in any order. A journal says what is there; the hash follows the bytes as
they arrive. What arrives ahead of it is read again from the page cache when its turn comes; what
an earlier run left is hashed from the disk, not fetched.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from pipeline.core import log
from pipeline.core.errors import Interrupted, PipelineError
from pipeline.core.files import os_errors_explained
from pipeline.core.log import Bar
from pipeline.core.net.http import NetClient
from pipeline.weights.disk.hashing import MarkedHash
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.router import (
    AttemptFailed,
    Attempts,
    ByteStream,
    Router,
    wrong_bytes,
)

# Large enough that asking costs nothing beside sending, small enough that eight connections share
# a shard of 5 GB (the usual size on the Hub) to its end.
RANGE_BYTES = 64 << 20
JOBS = 8  # what `hf download` uses, and what mirrors expect from one client
PIECE_BYTES = 1 << 18  # read at a time: fits the core's cache, where it is hashed right away
_MOST_REPORTED = 10  # errors of single files that are shown while the others go on
# At most this much of a range is fetched again after a kill, or what came in this time if less:
# eight connections over a slow line would otherwise lose a minute's work.
NOTE_BYTES, NOTE_S = 8 << 20, 1.0
_BURST_S = 0.25  # short enough that a limited line stays usable for others
_READ_BYTES = 1 << 20  # large enough for the disk, small enough to stay in a core's cache
Span = tuple[int, int]  # from, up to
_PAIR = re.compile(r"([0-9]{1,18}) ([0-9]{1,18})")


def write_at(handle: int, data: bytes | memoryview, at: int) -> None:
    """Write all of the bytes: pwrite(2) may write fewer, as on a nearly full disk."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, at)
        rest, at = rest[count:], at + count


class PartialFile:
    """A partial file, which parts are there, and which ranges threads are fetching."""

    def __init__(
        self, pin: FilePin, folder: Path, range_bytes: int, *, whole_ranges: bool = False
    ) -> None:
        """With `whole_ranges`, fetch a range again whole if only a part is there."""
        self.pin = pin
        self.path = folder / pin.want
        self._journal_path = folder / f"{pin.want}.journal"
        self._range_bytes = range_bytes
        lines: list[str] = []
        with suppress(OSError, UnicodeDecodeError):
            # `begin` gave it its full size; the journal knows nothing of what cut it since
            if self.path.stat().st_size == pin.size_bytes:
                lines = self._journal_path.read_text(encoding="ascii").splitlines()
        # a line that a kill cut short is no pair of numbers, or not one within the file
        pairs = [_PAIR.fullmatch(line) for line in lines]
        spans = [(int(pair[1]), int(pair[2])) for pair in pairs if pair]
        spans = [(a, b) for a, b in spans if a < b <= pin.size_bytes]
        if whole_ranges:
            size, step = pin.size_bytes, range_bytes
            spans = [(-(-a // step) * step, b - b % step * (b < size)) for a, b in merged(spans)]
        self._done = merged([(a, b) for a, b in spans if a < b])
        self.kept_bytes = sum(stop - start for start, stop in self._done)
        self._todo: list[Span] = []
        self._busy = 0
        self._guard = threading.Lock()
        self._hash_turn = threading.Lock()
        self.hash = MarkedHash(pin.new_hash())
        self._file = self._journal = -1
        self.rejected = ""  # the wrong digest of a first transfer; set from the second on
        self.is_alone = False  # the server sends only whole files: one connection
        self.blocks: tuple[str, ...] | None = None  # their hashes, where another host knows them
        self.right = 0  # a bit for each block that has its hash: those may be handed on
        self.fetched_bytes = 0
        self._is_claimed = False

    def begin(self) -> None:
        """Open the files and cut what is missing into ranges; call it once."""
        with os_errors_explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_CREAT | os.O_CLOEXEC
            if not self._done:
                self._journal_path.unlink(missing_ok=True)
            self._file = os.open(self.path, os.O_RDWR | flags, 0o644)
            os.truncate(self._file, self.pin.size_bytes)  # sparse: ranges arrive in any order
            self._journal = os.open(self._journal_path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
        self._todo = cut(missing(self._done, self.pin.size_bytes), self._range_bytes)

    @property
    def todo_bytes(self) -> int:
        """The bytes that no thread is fetching yet."""
        with self._guard:
            if self.is_alone and self._busy:
                return 0
            return sum(stop - start for start, stop in self._todo)

    def take(self, wanted: Span | None = None) -> Span | None:
        """Take the next range in order, or the wanted one; no other thread gets it."""
        with self._guard:
            if not self._todo or (self.is_alone and self._busy):
                return None
            self._busy += 1
            return self._todo.pop(self._todo.index(wanted) if wanted else 0)

    def todo(self) -> list[Span]:
        """The ranges that no thread is fetching yet."""
        with self._guard:
            return [] if self.is_alone and self._busy else list(self._todo)

    def take_whole(self) -> list[Span]:
        """Takes all missing ranges: the server sends whole files only.

        The first time it may be an accident, and a part is asked for once more.
        """
        with self._guard:
            if not self.is_alone:
                self.is_alone = True
                raise AttemptFailed("the server sent the whole file instead of the range")
            rest, self._todo = self._todo, []
            return rest

    def give_back(self, spans: list[Span]) -> None:
        """Ranges that did not come after all."""
        with self._guard:
            self._busy -= 1
            # never resume a file that was given up or finished
            if not self._is_claimed:
                self._todo = sorted([*(s for s in spans if s[0] < s[1]), *self._todo])

    def write(self, span: Span, at: int, piece: memoryview) -> None:
        """Put bytes in their place, and hash them if it is their turn."""
        with os_errors_explained(self.path):
            write_at(self._file, piece, at)
        # hashed while they are in memory, if all before them is hashed; else `catch_up` reads them
        if span[0] <= self.hash.at <= at and self._hash_turn.acquire(blocking=False):
            try:
                if span[0] <= self.hash.at <= at:
                    self._hash_upto(at)
                    self.hash.update(piece)
            finally:
                self._hash_turn.release()

    def note(self, start: int, stop: int) -> None:
        """Note that these bytes are there: a later run need not fetch them."""
        if start >= stop:
            return
        with os_errors_explained(self._journal_path), self._guard:
            # not synced: after a power cut some noted bytes may be gone, which the hash then shows
            os.write(self._journal, b"%d %d\n" % (start, stop))
            self._done = merged([*self._done, (start, stop)])
        # starts writing these pages to the disk without waiting for it (mm/fadvise.c), so that
        # the sync at the end finds little to do; dirty pages stay in memory until they are written
        with suppress(OSError):
            os.posix_fadvise(self._file, start, stop - start, os.POSIX_FADV_DONTNEED)

    def catch_up(self) -> None:
        """Hash what is ready after the front, unless another thread does."""
        while self.hash.at < self._ready() and self._hash_turn.acquire(blocking=False):
            try:
                self._hash_upto(self._ready())
            finally:
                # threads that find the turn taken leave; so its holder looks again before it goes
                self._hash_turn.release()

    def _ready(self) -> int:
        with self._guard:
            return next((b for a, b in self._done if a <= self.hash.at < b), self.hash.at)

    def _hash_upto(self, stop: int) -> None:
        while self.hash.at < stop:
            piece = os.pread(self._file, min(_READ_BYTES, stop - self.hash.at), self.hash.at)
            if not piece:
                raise OSError(f"{self.path}: became shorter")
            self.hash.update(piece)

    def claim_end(self, *, gives_up: bool = False) -> bool:
        """Whether the file is complete and hashed, or given up; true for one caller only."""
        with self._guard:
            if gives_up:
                self._todo = []  # no more of it is fetched in this run
            is_there = not self._todo and not self._busy and self.hash.at == self.pin.size_bytes
            is_first = (is_there or gives_up) and not self._is_claimed
            self._is_claimed |= is_first
            return is_first

    def start_over(self) -> None:
        """Fetch everything once more: the bytes were wrong, and may come right this time."""
        # first the journal: after a kill here nothing wrong is taken for fetched
        os.truncate(self._journal, 0)
        with self._guard:
            self.rejected, self._is_claimed = self.rejected or self.hash.digest, False
            self._done, self.hash = [], MarkedHash(self.pin.new_hash())
            self.right = 0
            self.kept_bytes = self.fetched_bytes = 0
            self._todo = cut([(0, self.pin.size_bytes)], self._range_bytes)

    def close(self) -> None:
        with self._guard:
            for handle in (self._file, self._journal):
                if handle >= 0:
                    os.close(handle)
            self._file = self._journal = -1

    def held(self, start: int, stop: int) -> int | None:
        """Open a new handle on bytes that are there; None if some are missing."""
        with self._guard:
            is_there = any(a <= start and stop <= b for a, b in self._done)
            return os.dup(self._file) if is_there and self._file >= 0 else None

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        os.fsync(self._file)

    def forget(self) -> None:
        """Remove the partial file and its journal."""
        self.close()
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)


def adopt(source: Path, pin: FilePin, folder: Path) -> None:
    """Make a file that lies elsewhere on this disk the partial file of a pin, complete."""
    folder.mkdir(parents=True, exist_ok=True)
    # in this order: after a kill in between nothing wrong is taken for complete, and what is
    # complete is not fetched again
    (folder / pin.want).unlink(missing_ok=True)
    (folder / f"{pin.want}.journal").write_text(f"0 {pin.size_bytes}\n", encoding="ascii")
    os.replace(source, folder / pin.want)


def merged(spans: list[Span]) -> list[Span]:
    """Sort spans, and join those that touch."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def missing(done: list[Span], size_bytes: int) -> list[Span]:
    """The gaps between what is there."""
    edges = [0, *(edge for span in done for edge in span), size_bytes]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(start, stop) for start, stop in pairs if start < stop]


def cut(spans: list[Span], range_bytes: int) -> list[Span]:
    """Cut spans into pieces of at most so many bytes, at the same places in every run."""
    pieces = []
    for start, stop in spans:
        while start < stop:
            edge = min(stop, (start // range_bytes + 1) * range_bytes)
            pieces.append((start, edge))
            start = edge
    return pieces


@dataclass(frozen=True)
class Options:
    """How many connections, how large the ranges, how fast at most."""

    jobs: int = JOBS
    range_bytes: int = RANGE_BYTES
    limit_bytes_per_s: float | None = None
    first_wait_s: float = 0.5


class Throttle:
    """Lets at most so many bytes a second pass over all connections; None is no limit."""

    def __init__(self, bytes_per_s: float | None, stop: threading.Event) -> None:
        self._rate, self._stop = bytes_per_s, stop
        self._free_at = time.monotonic()
        self._guard = threading.Lock()

    def new_buffer(self) -> memoryview:
        """Make a buffer for one read: smaller with a low limit, so that bytes flow evenly."""
        rate = self._rate
        size = PIECE_BYTES if rate is None else max(1, min(PIECE_BYTES, int(rate * _BURST_S)))
        return memoryview(bytearray(size))

    def read(self, body: ByteStream, buffer: memoryview) -> int:
        """Read into the buffer as soon as so many bytes may pass; first come, first served."""
        if self._stop.is_set():
            raise Interrupted("stopped")
        self.take(len(buffer))
        return body.readinto(buffer)

    def take(self, n_bytes: int) -> None:
        """Wait until so many bytes may pass."""
        if self._rate is None:
            return
        with self._guard:
            now = time.monotonic()
            # unused time is only saved up to a short burst, else a pause would end in a flood
            begin = max(self._free_at, now - _BURST_S)
            self._free_at = begin + n_bytes / self._rate
            wait_s = self._free_at - now
        if wait_s > 0 and self._stop.wait(wait_s):
            raise Interrupted("stopped")


class Lane(NamedTuple):
    """What one thread works with: its attempts, and the buffer that it reads into."""

    attempts: Attempts
    buffer: memoryview


@dataclass(eq=False)
class WorkerPool:
    """Transfers all files: small ones first, and the last large ones by all threads together."""

    partial_files: Sequence[PartialFile]
    router: Router
    client: NetClient
    options: Options
    bar: Bar
    install: Callable[[PartialFile], None]

    def __post_init__(self) -> None:
        # small files first: configs and code are complete, and can be read, within seconds
        self._new = deque(sorted(self.partial_files, key=lambda p: p.pin.size_bytes))
        self._begun: list[PartialFile] = []
        self._unfinished = len(self.partial_files)
        self._throttle = Throttle(self.options.limit_bytes_per_s, self.client.stop)
        self._changed = threading.Condition()
        self._results: SimpleQueue[Exception | None] = SimpleQueue()
        self._errors: list[PipelineError] = []

    def run(self) -> None:
        """Work until every file is installed; raises the first reason why one is not.

        A file that no source has, or that arrives wrong, does not keep the others away.
        """
        # daemons: one that hangs in a name lookup must not keep the process from ending
        jobs = range(self.options.jobs)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in jobs]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                # a queue, not join(): the first error ends the run while others still transfer
                if (error := self._results.get()) is not None:
                    raise error
        finally:
            # also on Ctrl-C: no thread reads, waits or hashes any more
            if any(thread.is_alive() for thread in threads):
                self.client.hang_up()
            self._wake()
            if self.client.join(threads):
                for partial in self._begun:
                    partial.close()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        attempts = Attempts(self.router, self.client.stop, self.options.first_wait_s)
        lane = Lane(attempts, self._throttle.new_buffer())
        partial: PartialFile | None = None
        try:
            while job := self._next_job(partial):
                partial, span = job
                partial.catch_up()
                if span is not None:
                    self._transfer(partial, span, lane)
                    partial.catch_up()
                if partial.claim_end():
                    self._finish(partial)
        except Exception as error:
            self._results.put(error)
        else:
            self._results.put(None)

    def _next_job(self, last: PartialFile | None) -> tuple[PartialFile, Span | None] | None:
        """Pick a range of the same file, a new one, else the one with most to do."""
        with self._changed:
            while not self.client.stop.is_set():
                if last is not None and (span := last.take()):
                    return last, span
                if self._new:
                    partial = self._new.popleft()
                    partial.begin()
                    self._begun.append(partial)
                    return partial, partial.take()
                # so that the last large files of a set come over all connections
                most = max(self._begun, key=lambda p: p.todo_bytes, default=None)
                if most is not None and (span := most.take()):
                    return most, span
                if not self._unfinished:
                    return None
                self._changed.wait(1.0)  # not for ever: a stop does not notify
        raise Interrupted("stopped")

    def _transfer(self, partial: PartialFile, span: Span, lane: Lane) -> None:
        """One attempt at a range; a later one fetches what does not come."""
        attempts, spans = lane.attempts, [span]
        failed: AttemptFailed | None = None
        try:
            with closing(attempts.open(partial.pin, *span)) as body:
                # write what the server sends anyway, instead of asking for it again
                if body.is_whole:
                    spans += partial.take_whole()
                self._write(partial, body, spans, lane)
            attempts.completed()
        except AttemptFailed as failure:
            failed = failure
        except PipelineError as error:
            # an error that every file would meet (no network, no access) ends the run
            if not self.router.lacks_only(partial.pin):
                raise
            if partial.claim_end(gives_up=True):
                self._errors.append(error)
                self._wake(finished=1)
                if self._unfinished and len(self._errors) <= _MOST_REPORTED:
                    log.say(f"  {error}; going on with the other files")
        finally:
            partial.give_back(spans)
            self._wake()
        if failed is not None:
            attempts.failed(partial.pin, failed)

    def _write(self, partial: PartialFile, body: ByteStream, spans: list[Span], lane: Lane) -> None:
        """Write from the connection to the disk; `spans` always holds what is missing."""
        buffer = lane.buffer
        at = 0 if body.is_whole else spans[0][0]
        while spans:
            start, stop = spans[0]
            while at < start:
                at += self._throttle.read(body, buffer[: start - at])
            noted, noted_s = start, time.monotonic()
            try:
                while at < stop:
                    count = self._throttle.read(body, buffer[: stop - at])
                    partial.write((start, stop), at, buffer[:count])
                    at += count
                    lane.attempts.received()
                    self.bar.advance(count)
                    partial.fetched_bytes += count
                    if at - noted >= NOTE_BYTES or time.monotonic() - noted_s >= NOTE_S:
                        partial.note(noted, at)
                        noted, noted_s = at, time.monotonic()
            finally:
                partial.note(noted, at)
                spans[0] = (at, stop)
            spans.pop(0)

    def _finish(self, partial: PartialFile) -> None:
        """Install a file whose hash is right; fetch a wrong one once more; then drop it."""
        pin, got = partial.pin, partial.hash.digest
        if got == pin.want:
            self.install(partial)
        elif self.router.arrived_wrong(pin) or not partial.rejected:
            log.say(
                f"  {pin.path}: received {got[:12]}…, locked as {pin.want[:12]}…; fetching it again"
            )
            # the bar counts bytes that are kept
            self.bar.advance(-partial.fetched_bytes)
            partial.start_over()
            return self._wake()
        else:
            # the same twice is what the server has; two different ones, a transfer fault
            first = "both times" if got == partial.rejected else f"after {partial.rejected}"
            partial.forget()
            self._errors.append(
                wrong_bytes(f"{pin.path}: locked as {pin.want}, received {got} {first}")
            )
        self._wake(finished=1)

    def _wake(self, finished: int = 0) -> None:
        """Wake the threads that wait for something to do."""
        with self._changed:
            self._unfinished -= finished
            self._changed.notify_all()
