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
from pipeline.weights.arrival import Arrival, Span
from pipeline.weights.model import FilePin
from pipeline.weights.routes import Body, Lost, Router, wrong_bytes
from pipeline.weights.throttle import Throttle
from pipeline.weights.tries import Tries

PIECE_BYTES = 1 << 18
_MOST_REPORTED = 10
NOTE_BYTES = 8 << 20  # so much of a range may be lost with the process


class Crew:
    """Brings all arrivals to their end; small files first, and the last ones by all together."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        router: Router,
        client: Client,
        throttle: Throttle,
        *,
        first_wait_s: float,
        bar: Bar,
        settle: Callable[[Arrival], None],
    ) -> None:
        self._new = deque(sorted(arrivals, key=lambda a: a.pin.size_bytes))
        self._begun: list[Arrival] = []
        self._left = len(arrivals)
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
            for arrival in self._begun:
                arrival.close()

    def _work(self) -> None:
        tries = Tries(self._router, self._client.stop, self._first_wait_s)
        buffer = memoryview(bytearray(self._throttle.piece_bytes(PIECE_BYTES)))
        arrival: Arrival | None = None
        try:
            while taken := self._take(arrival):
                arrival, span = taken
                arrival.catch_up()
                if span is not None:
                    self._bring(arrival, span, tries, buffer)
                    arrival.catch_up()
                if arrival.claim_end():
                    self._end(arrival)
        except Exception as error:
            self._ended.put(error)
        else:
            self._ended.put(None)

    def _take(self, last: Arrival | None) -> tuple[Arrival, Span | None] | None:
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

    def _begin(self, arrival: Arrival) -> tuple[Arrival, Span | None]:
        arrival.begin()
        self._begun.append(arrival)
        return arrival, arrival.take()

    def _bring(self, arrival: Arrival, span: Span, tries: Tries, buffer: memoryview) -> None:
        """One try at a range; what does not come goes back on the table."""
        spans = [span]
        try:
            body = tries.open(arrival.pin, *span, arrival.turn)
            try:
                if body.is_whole:
                    spans += arrival.take_whole()
                self._pour(arrival, body, spans, tries, buffer)
            finally:
                body.close()
            tries.arrived()
        except Lost as lost:
            self._put_back(arrival, spans)
            tries.failed(arrival.pin, lost)
        except PipelineError as error:
            self._put_back(arrival, spans)
            if not self._router.lacks_only(arrival.pin):
                raise
            self._give_up(arrival, error)
        except BaseException:
            self._put_back(arrival, spans)
            raise
        else:
            self._put_back(arrival, [])

    def _give_up(self, arrival: Arrival, error: PipelineError) -> None:
        """Leave one file as it is, once, and go on with the others."""
        if not arrival.give_up():
            return
        with self._news:
            self._failed.append(error)
            self._left -= 1
            is_last = not self._left
        if not is_last and len(self._failed) <= _MOST_REPORTED:
            log.say(f"  {error}; the other files go on")
        self._tell()

    def _put_back(self, arrival: Arrival, spans: list[Span]) -> None:
        arrival.give_back(spans)
        self._tell()

    def _pour(
        self,
        arrival: Arrival,
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
                    arrival.write((start, stop), at, buffer[:count])
                    at += count
                    tries.moved()
                    self._bar.advance(count)
                    arrival.fetched_bytes += count
                    if at - noted >= NOTE_BYTES:
                        arrival.note(noted, at)
                        noted = at
            finally:
                arrival.note(noted, at)
                spans[0] = (at, stop)
            spans.pop(0)

    def _read(self, body: Body, buffer: memoryview) -> int:
        if self._client.stop.is_set():
            raise Interrupted("stopped")
        self._throttle.take(len(buffer))
        return body.readinto(buffer)

    def _end(self, arrival: Arrival) -> None:
        """Name a file whose hash is right; fetch a wrong one once more; then drop it."""
        pin, got = arrival.pin, arrival.digest
        if got == pin.want:
            if arrival.is_second:
                log.say(f"  {pin.path}: {arrival.differing()} had come wrong, and came again")
            self._settle(arrival)
        elif not arrival.is_second:
            log.say(f"  {pin.path}: came as {got[:12]}…, locked as {pin.want[:12]}…; once more")
            self._bar.advance(-arrival.fetched_bytes)
            arrival.start_over()
            return self._tell()
        else:
            where = arrival.differing() or "both times the same bytes"
            arrival.forget()
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
