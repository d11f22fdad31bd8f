"""Threads that bring ranges: each stays with a file, and helps with another when it is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

from pipeline import log
from pipeline.errors import Interrupted, PipelineError
from pipeline.fetch.http import Client
from pipeline.log import Bar
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.partial_file import PartialFile, Span
from pipeline.weights.transfer.routes import Body, Lost, Router, wrong_bytes
from pipeline.weights.transfer.throttle import Throttle
from pipeline.weights.transfer.tries import Tries

PIECE_BYTES = 1 << 18
_MOST_REPORTED = 10
NOTE_BYTES = 8 << 20  # so much of a range may be lost with the process


class WorkerPool:
    """Brings all arrivals to their end; small files first, and the last ones by all together."""

    def __init__(
        self,
        partial_files: Sequence[PartialFile],
        router: Router,
        client: Client,
        throttle: Throttle,
        *,
        first_wait_s: float,
        bar: Bar,
        settle: Callable[[PartialFile], None],
    ) -> None:
        self._new = deque(sorted(partial_files, key=lambda a: a.pin.size_bytes))
        self._begun: list[PartialFile] = []
        self._left = len(partial_files)
        self._router, self._client, self._throttle = router, client, throttle
        self._first_wait_s, self._bar, self._settle = first_wait_s, bar, settle
        self._news = threading.Condition()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._failed: list[PipelineError] = []

    def run(self, jobs: int) -> None:
        """Work until everything is settled; raises the first reason why it is not.

        A file that nobody has, or that comes wrong, does not keep the others away.
        """
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        try:
            for thread in threads:
                thread.start()
            for _ in threads:
                if (error := self._ended.get()) is not None:
                    raise error
        finally:
            self._say_goodbye(threads)
        if self._failed:
            raise self._failed[0]

    def _say_goodbye(self, threads: Sequence[threading.Thread]) -> None:
        """Also on Ctrl-C: nobody reads, waits or hashes any more."""
        if any(thread.is_alive() for thread in threads):
            self._client.hang_up()
        self._tell()
        if self._client.join(threads):
            for partial_file in self._begun:
                partial_file.close()

    def _work(self) -> None:
        tries = Tries(self._router, self._client.stop, self._first_wait_s)
        buffer = memoryview(bytearray(self._throttle.piece_bytes(PIECE_BYTES)))
        partial_file: PartialFile | None = None
        try:
            while taken := self._take(partial_file):
                partial_file, span = taken
                partial_file.catch_up()
                if span is not None:
                    self._bring(partial_file, span, tries, buffer)
                    partial_file.catch_up()
                if partial_file.claim_end():
                    self._end(partial_file)
        except Exception as error:
            self._ended.put(error)
        else:
            self._ended.put(None)

    def _take(self, last: PartialFile | None) -> tuple[PartialFile, Span | None] | None:
        """Something to do: the same file, a new one, else the one that needs help most."""
        with self._news:
            while not self._client.stop.is_set():
                if last is not None and (span := last.take()):
                    return last, span
                if self._new:
                    return self._begin(self._new.popleft())
                most = max(self._begun, key=lambda a: a.todo_bytes, default=None)
                if most is not None and (span := most.take()):
                    return most, span
                if not self._left:
                    return None
                self._news.wait(1.0)
        raise Interrupted("stopped")

    def _begin(self, partial_file: PartialFile) -> tuple[PartialFile, Span | None]:
        partial_file.begin()
        self._begun.append(partial_file)
        return partial_file, partial_file.take()

    def _bring(
        self, partial_file: PartialFile, span: Span, tries: Tries, buffer: memoryview
    ) -> None:
        """One try at a range; what does not come goes back on the table."""
        spans = [span]
        try:
            body = tries.open(partial_file.pin, *span, partial_file.turn)
            try:
                if body.is_whole:
                    spans += partial_file.take_whole()
                self._pour(partial_file, body, spans, tries, buffer)
            finally:
                body.close()
            tries.arrived()
        except Lost as lost:
            self._put_back(partial_file, spans)
            tries.failed(partial_file.pin, lost)
        except PipelineError as error:
            self._put_back(partial_file, spans)
            if not self._router.lacks_only(partial_file.pin):
                raise
            self._give_up(partial_file, error)
        except BaseException:
            self._put_back(partial_file, spans)
            raise
        else:
            self._put_back(partial_file, [])

    def _give_up(self, partial_file: PartialFile, error: PipelineError) -> None:
        """Leave one file as it is, once, and go on with the others."""
        if not partial_file.give_up():
            return
        with self._news:
            self._failed.append(error)
            self._left -= 1
            is_last = not self._left
        if not is_last and len(self._failed) <= _MOST_REPORTED:
            log.say(f"  {error}; the other files go on")
        self._tell()

    def _put_back(self, partial_file: PartialFile, spans: list[Span]) -> None:
        partial_file.give_back(spans)
        self._tell()

    def _pour(
        self,
        partial_file: PartialFile,
        body: Body,
        spans: list[Span],
        tries: Tries,
        buffer: memoryview,
    ) -> None:
        """From the connection to the disk; `spans` always says what has not come."""
        at = 0 if body.is_whole else spans[0][0]
        while spans:
            start, stop = spans[0]
            while at < start:
                at += self._read(body, buffer[: start - at])
            noted = start
            try:
                while at < stop:
                    count = self._read(body, buffer[: stop - at])
                    partial_file.write((start, stop), at, buffer[:count])
                    at += count
                    tries.moved()
                    self._bar.advance(count)
                    partial_file.fetched_bytes += count
                    if at - noted >= NOTE_BYTES:
                        partial_file.note(noted, at)
                        noted = at
            finally:
                partial_file.note(noted, at)
                spans[0] = (at, stop)
            spans.pop(0)

    def _read(self, body: Body, buffer: memoryview) -> int:
        if self._client.stop.is_set():
            raise Interrupted("stopped")
        self._throttle.take(len(buffer))
        return body.readinto(buffer)

    def _end(self, partial_file: PartialFile) -> None:
        """Name a file whose hash is right; fetch a wrong one once more; then drop it."""
        pin, got = partial_file.pin, partial_file.digest
        if got == pin.want:
            if partial_file.is_second:
                log.say(f"  {pin.path}: {partial_file.differing()} had come wrong, and came again")
            self._settle(partial_file)
        elif not partial_file.is_second:
            log.say(f"  {pin.path}: came as {got[:12]}…, locked as {pin.want[:12]}…; once more")
            self._bar.advance(-partial_file.fetched_bytes)
            partial_file.start_over()
            return self._tell()
        else:
            where = partial_file.differing() or "both times the same bytes"
            partial_file.forget()
            self._failed.append(
                wrong_bytes(f"{pin.path}: locked as {pin.want}, received {got} ({where})")
            )
        with self._news:
            self._left -= 1
        self._tell()

    def _tell(self) -> None:
        """Wake those who wait for something to do."""
        with self._news:
            self._news.notify_all()


def pieces_of(
    router: Router,
    pin: FilePin,
    start: int,
    stop: int,
    client: Client,
    throttle: Throttle,
    first_wait_s: float,
) -> Iterator[bytes]:
    """One range, in order, over as many tries as it takes."""
    tries = Tries(router, client.stop, first_wait_s)
    buffer = memoryview(bytearray(throttle.piece_bytes(PIECE_BYTES)))
    while start < stop:
        try:
            body = tries.open(pin, start, stop)
            try:
                skip = start if body.is_whole else 0
                while skip:
                    skip -= body.readinto(buffer[:skip])
                while start < stop:
                    throttle.take(min(len(buffer), stop - start))
                    count = body.readinto(buffer[: stop - start])
                    tries.moved()
                    start += count
                    yield bytes(buffer[:count])
            finally:
                body.close()
        except Lost as lost:
            tries.failed(pin, lost)
