"""Threads that transfer ranges: each stays with a file, and helps with another when it is done."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from queue import SimpleQueue

from pipeline.core import log
from pipeline.core.errors import Interrupted, PipelineError
from pipeline.core.log import Bar
from pipeline.core.net.http import Client
from pipeline.weights.transfer.partial_file import PartialFile, Span
from pipeline.weights.transfer.router import (
    AttemptFailed,
    Attempts,
    ByteStream,
    Router,
    wrong_bytes,
)

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

    def new_buffer(self) -> memoryview:
        """A buffer for one read: smaller with a low limit, so that it flows evenly."""
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
        self._unfinished = len(partial_files)
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
            # also on Ctrl-C: no thread reads, waits or hashes any more
            if any(thread.is_alive() for thread in threads):
                self._client.hang_up()
            self._wake()
            if self._client.join(threads):
                for partial in self._begun:
                    partial.close()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        attempts = Attempts(self._router, self._client.stop, self._first_wait_s)
        buffer = self._throttle.new_buffer()
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
        """A range of the same file, of a new one, else of the one with most to do."""
        with self._changed:
            while not self._client.stop.is_set():
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

    def _transfer(
        self, partial: PartialFile, span: Span, attempts: Attempts, buffer: memoryview
    ) -> None:
        """One attempt at a range; a later one fetches what does not come."""
        spans = [span]
        failed: AttemptFailed | None = None
        try:
            with closing(attempts.open(partial.pin, *span)) as body:
                # what the server sends anyway is written, not thrown away and asked for again
                if body.is_whole:
                    spans += partial.take_whole()
                self._write(partial, body, spans, attempts, buffer)
            attempts.completed()
        except AttemptFailed as failure:
            failed = failure
        except PipelineError as error:
            # an error that every file would meet (no network, no access) ends the run
            if not self._router.lacks_only(partial.pin):
                raise
            if partial.give_up():
                self._errors.append(error)
                self._count_finished()
                if self._unfinished and len(self._errors) <= _MOST_REPORTED:
                    log.say(f"  {error}; going on with the other files")
        finally:
            partial.give_back(spans)
            self._wake()
        if failed is not None:
            attempts.failed(partial.pin, failed)

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
                at += self._throttle.read(body, buffer[: start - at])
            noted, noted_s = start, time.monotonic()
            try:
                while at < stop:
                    count = self._throttle.read(body, buffer[: stop - at])
                    partial.write((start, stop), at, buffer[:count])
                    at += count
                    attempts.received()
                    self._bar.advance(count)
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
        pin, got = partial.pin, partial.digest
        if got == pin.want:
            self._install(partial)
        elif self._router.arrived_wrong(pin) or not partial.rejected:
            log.say(
                f"  {pin.path}: received {got[:12]}…, locked as {pin.want[:12]}…; fetching it again"
            )
            # the bar counts bytes that are kept
            self._bar.advance(-partial.fetched_bytes)
            partial.start_over()
            return self._wake()
        else:
            # the same twice is what the server has; two different ones, a transfer fault
            first = "both times" if got == partial.rejected else f"after {partial.rejected}"
            partial.forget()
            self._errors.append(
                wrong_bytes(f"{pin.path}: locked as {pin.want}, received {got} {first}")
            )
        self._count_finished()
        self._wake()

    def _count_finished(self) -> None:
        with self._changed:
            self._unfinished -= 1

    def _wake(self) -> None:
        """Wake the threads that wait for something to do."""
        with self._changed:
            self._changed.notify_all()
