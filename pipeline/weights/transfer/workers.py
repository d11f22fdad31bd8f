"""Threads that transfer ranges: each stays with a file, and helps with another when it is done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from pipeline import log
from pipeline.errors import Interrupted, PipelineError
from pipeline.fetch.http import Client
from pipeline.log import Bar
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.partial_file import PartialFile, Span
from pipeline.weights.transfer.router import Attempts, Router
from pipeline.weights.transfer.routes import AttemptFailed, ByteStream, wrong_bytes

PIECE_BYTES = 1 << 18  # read at a time: fits the core's cache, where it is hashed right away
_MOST_REPORTED = 10  # errors of single files that are shown while the others go on
# At most this much of a range is fetched again after a kill, or what came in this time if less:
# eight connections over a slow line would otherwise lose a minute's work.
NOTE_BYTES, NOTE_S = 8 << 20, 1.0
_BURST_S = 0.25  # short enough that a limited line stays usable for others


class Throttle:
    """At most so many bytes a second over all connections; None is no limit."""

    def __init__(self, bytes_per_s: float | None, stop: threading.Event) -> None:
        self._rate, self._stop = bytes_per_s, stop
        self._free_at = time.monotonic()
        self._guard = threading.Lock()

    def piece_bytes(self, most: int) -> int:
        """How much to read at a time, so that a low limit still flows evenly."""
        return most if self._rate is None else max(1, min(most, int(self._rate * _BURST_S)))

    def take(self, n_bytes: int) -> None:
        """Wait until so many bytes may pass; first come, first served."""
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


class WorkerPool:
    """Transfers all files: small ones first, and the last large ones by all threads together."""

    def __init__(
        self,
        partial_files: Sequence[PartialFile],
        router: Router,
        client: Client,
        throttle: Throttle,
        *,
        first_wait_s: float,
        bar: Bar,
        install: Callable[[PartialFile], None],
    ) -> None:
        # small files first: configs and code are complete, and can be read, within seconds
        self._new = deque(sorted(partial_files, key=lambda p: p.pin.size_bytes))
        self._begun: list[PartialFile] = []
        self._left = len(partial_files)
        self._router, self._client, self._throttle = router, client, throttle
        self._first_wait_s, self._bar, self._install = first_wait_s, bar, install
        self._changed = threading.Condition()
        self._results: SimpleQueue[Exception | None] = SimpleQueue()
        self._errors: list[PipelineError] = []

    def run(self, jobs: int) -> None:
        """Work until every file is installed; raises the first reason why one is not.

        A file that no source has, or that arrives wrong, does not keep the others away.
        """
        # daemons: one that hangs in a name lookup must not keep the process from ending
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                # a queue, not join(): the first error ends the run while others still transfer
                if (error := self._results.get()) is not None:
                    raise error
        finally:
            self._join(threads)
        if self._errors:
            raise self._errors[0]

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Also on Ctrl-C: no thread reads, waits or hashes any more."""
        if any(thread.is_alive() for thread in threads):
            self._client.hang_up()
        self._wake()
        if self._client.join(threads):
            for partial in self._begun:
                partial.close()

    def _work(self) -> None:
        attempts = Attempts(self._router, self._client.stop, self._first_wait_s)
        buffer = memoryview(bytearray(self._throttle.piece_bytes(PIECE_BYTES)))
        partial: PartialFile | None = None
        try:
            while job := self._next_job(partial):
                partial, span = job
                partial.catch_up()
                if span is not None:
                    self._transfer(partial, span, attempts, buffer)
                    partial.catch_up()
                if partial.claim_end():
                    self._finish(partial)
        except Exception as error:
            self._results.put(error)
        else:
            self._results.put(None)

    def _next_job(self, last: PartialFile | None) -> tuple[PartialFile, Span | None] | None:
        """A range of the same file, of a new one, else of the one with most left to do."""
        with self._changed:
            while not self._client.stop.is_set():
                if last is not None and (span := last.take()):
                    return last, span
                if self._new:
                    return self._begin(self._new.popleft())
                # so that the last large files of a set come over all connections
                most = max(self._begun, key=lambda p: p.todo_bytes, default=None)
                if most is not None and (span := most.take()):
                    return most, span
                if not self._left:
                    return None
                self._changed.wait(1.0)  # not for ever: a stop does not notify
        raise Interrupted("stopped")

    def _begin(self, partial: PartialFile) -> tuple[PartialFile, Span | None]:
        partial.begin()
        self._begun.append(partial)
        return partial, partial.take()

    def _transfer(
        self, partial: PartialFile, span: Span, attempts: Attempts, buffer: memoryview
    ) -> None:
        """One attempt at a range; what does not come is left to a later one."""
        spans = [span]
        try:
            body = attempts.open(partial.pin, *span)
            try:
                # what the server sends anyway is written, not thrown away and asked for again
                if body.is_whole:
                    spans += partial.take_whole()
                self._write(partial, body, spans, attempts, buffer)
            finally:
                body.close()
            attempts.completed()
        except AttemptFailed as failure:
            self._put_back(partial, spans)
            attempts.failed(partial.pin, failure)
        except PipelineError as error:
            self._put_back(partial, spans)
            # an error that every file would meet (no network, no access) ends the run
            if not self._router.lacks_only(partial.pin):
                raise
            self._give_up(partial, error)
        except BaseException:
            self._put_back(partial, spans)
            raise
        else:
            self._put_back(partial, [])

    def _give_up(self, partial: PartialFile, error: PipelineError) -> None:
        """Leave one file as it is, once, and go on with the others."""
        if not partial.give_up():
            return
        with self._changed:
            self._errors.append(error)
            self._left -= 1
            is_last = not self._left
        if not is_last and len(self._errors) <= _MOST_REPORTED:
            log.say(f"  {error}; going on with the other files")
        self._wake()

    def _put_back(self, partial: PartialFile, spans: list[Span]) -> None:
        partial.give_back(spans)
        self._wake()

    def _write(
        self,
        partial: PartialFile,
        body: ByteStream,
        spans: list[Span],
        attempts: Attempts,
        buffer: memoryview,
    ) -> None:
        """From the connection to the disk; `spans` always holds what has not come yet."""
        at = 0 if body.is_whole else spans[0][0]
        while spans:
            start, stop = spans[0]
            while at < start:
                at += self._read(body, buffer[: start - at])
            noted, noted_s = start, time.monotonic()
            try:
                while at < stop:
                    count = self._read(body, buffer[: stop - at])
                    partial.write((start, stop), at, buffer[:count])
                    at += count
                    attempts.received(count)
                    self._bar.advance(count)
                    partial.fetched_bytes += count
                    if at - noted >= NOTE_BYTES or time.monotonic() - noted_s >= NOTE_S:
                        partial.note(noted, at)
                        noted, noted_s = at, time.monotonic()
            finally:
                partial.note(noted, at)
                spans[0] = (at, stop)
            spans.pop(0)

    def _read(self, body: ByteStream, buffer: memoryview) -> int:
        if self._client.stop.is_set():
            raise Interrupted("stopped")
        self._throttle.take(len(buffer))
        return body.readinto(buffer)

    def _finish(self, partial: PartialFile) -> None:
        """Install a file whose hash is right; fetch a wrong one once more; then drop it."""
        pin, got = partial.pin, partial.digest
        if got == pin.want:
            self._router.arrived_right(pin)
            self._install(partial)
        elif self._may_come_right(partial):
            log.say(
                f"  {pin.path}: received {got[:12]}…, locked as {pin.want[:12]}…; fetching it again"
            )
            # the bar counts bytes that are kept
            self._bar.advance(-partial.fetched_bytes)
            partial.start_over()
            return self._wake()
        else:
            # the same twice is what the server has; two different ones, a fault on the way
            first = "both times" if got == partial.rejected else f"after {partial.rejected}"
            partial.forget()
            self._errors.append(
                wrong_bytes(f"{pin.path}: locked as {pin.want}, received {got} {first}")
            )
        with self._changed:
            self._left -= 1
        self._wake()

    def _may_come_right(self, partial: PartialFile) -> bool:
        """Once more from anybody, for a fault on the way; then from each source that is left."""
        is_all_new = not partial.kept_bytes
        return self._router.arrived_wrong(partial.pin, is_all_new=is_all_new) or (
            not partial.rejected
        )

    def _wake(self) -> None:
        """Wake the threads that wait for something to do."""
        with self._changed:
            self._changed.notify_all()


def read_range(
    router: Router,
    pin: FilePin,
    start: int,
    stop: int,
    client: Client,
    throttle: Throttle,
    first_wait_s: float,
) -> Iterator[bytes]:
    """One range, in order, over as many attempts as it takes."""
    attempts = Attempts(router, client.stop, first_wait_s)
    buffer = memoryview(bytearray(throttle.piece_bytes(PIECE_BYTES)))
    while start < stop:
        try:
            body = attempts.open(pin, start, stop)
            try:
                skip = start if body.is_whole else 0
                while skip:
                    skip -= body.readinto(buffer[:skip])
                while start < stop:
                    throttle.take(min(len(buffer), stop - start))
                    count = body.readinto(buffer[: stop - start])
                    attempts.received(count)
                    start += count
                    yield bytes(buffer[:count])
            finally:
                body.close()
        except AttemptFailed as failure:
            attempts.failed(pin, failure)
