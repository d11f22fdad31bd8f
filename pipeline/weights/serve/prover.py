"""Proves every served file: by a receipt, or by hashing it in the background."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.core.errors import Interrupted
from pipeline.core.files import cores
from pipeline.weights.disk import hashing
from pipeline.weights.disk.hashing import FileUnfit, FileUnreadable, Identity
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder

SMALL_BYTES = 8 << 20  # such files are hashed again each time they are sent
_WAIT_S = 8.0  # a request waits so long for its file to be hashed, then gets a 503; hf waits 10 s
_MOST_THREADS = 4  # hashing must leave cores for sending
_RETRY_S = 1.0
_MOST_RETRIES = 5  # without a request; each request for the file tries again
# A file written to in the same tick of a disk's clock could change once more without a trace.
_TICK_S = 2.0

State = Literal["unproved", "proved", "wrong"]


class NotYet(Exception):
    """The file is not hashed yet, or cannot be read now; ask again later."""


@dataclass(eq=False)
class ServedFile:
    """One file that may be served, and what we know about it."""

    place: LockedFolder
    pin: FilePin
    state: State = "unproved"
    seen: Identity | None = None  # as it was when it was judged
    why: str = ""
    trouble: str = ""  # why it could not be read the last time; proves nothing about it
    retries: int = 0
    queued: bool = False
    judged: threading.Event = field(default_factory=threading.Event)

    @property
    def is_small(self) -> bool:
        return self.pin.size_bytes < SMALL_BYTES


class Prover:
    """Hashes files in the background, those that clients ask for first."""

    def __init__(
        self,
        files: Iterable[ServedFile],
        proved: Callable[[LockedFolder], Mapping[str, Identity]] = lambda place: {},
    ) -> None:
        """Skip hashing files that have not changed since a receipt `proved` them."""
        self.files = list(files)
        self.advance: hashing.Advance = lambda n_bytes: None
        self._queue: deque[ServedFile] = deque()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"prove-{n}", daemon=True)
            for n in range(min(_MOST_THREADS, cores()))
        ]
        receipts: dict[Path, Mapping[str, Identity]] = {}
        for held in self.files:
            state = held.place.state
            if state not in receipts:
                receipts[state] = proved(held.place)
            if (known := receipts[state].get(held.pin.path)) is None:
                continue
            with suppress(FileUnfit, FileUnreadable):
                handle = hashing.open_pin(held.place, held.pin)
                # of the open file, not of its name: a name can be moved between the two looks
                if hashing.identity_of(os.fstat(handle)) == known:
                    self._set(held, "proved", known, "")
                os.close(handle)

    def start(self) -> None:
        """Begin with the small files: clients ask for those first."""
        for held in sorted(self.files, key=lambda h: h.pin.size_bytes):
            if held.state == "unproved":
                self._enqueue(held, first=False)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()

    def open(self, held: ServedFile) -> tuple[int, Identity]:
        """Open a large file, proved to be the one that was hashed."""
        handle = self._opened(held)
        try:
            now = hashing.identity_of(os.fstat(handle))
            if self._verdict(held)[1] != now:
                held.judged.clear()
                self._enqueue(held, first=True)
                held.judged.wait(_WAIT_S)
            state, seen, why = self._verdict(held)
            if seen != now or state == "unproved":
                raise NotYet(held.trouble or "is still being checked")
            if state == "wrong":
                raise FileUnfit(why)
            return handle, now
        except BaseException:
            os.close(handle)
            raise

    def read(self, held: ServedFile) -> bytes:
        """Read a small file, and hash its bytes now."""
        handle = self._opened(held)
        try:
            # one byte more than is locked shows a file that grew
            data = os.pread(handle, held.pin.size_bytes + 1, 0)
            wanted = held.pin.new_hash()
            wanted.update(data)
            if len(data) != held.pin.size_bytes:
                raise FileUnfit(f"does not have the locked {held.pin.size_bytes} bytes")
            if wanted.hexdigest() != held.pin.want:
                raise FileUnfit("does not have the locked bytes")
            self._set(held, "proved", hashing.identity_of(os.fstat(handle)), "")
            return data
        except FileUnfit as reason:
            self._set(held, "wrong", hashing.identity_of(os.fstat(handle)), str(reason))
            raise
        except OSError as error:
            raise NotYet(_not_now(error)) from None
        finally:
            os.close(handle)

    def _opened(self, held: ServedFile) -> int:
        try:
            return hashing.open_pin(held.place, held.pin)
        except FileUnfit as reason:
            self._set(held, "wrong", None, str(reason))
            raise
        except FileUnreadable as reason:
            raise NotYet(str(reason)) from None

    def _enqueue(self, held: ServedFile, *, first: bool) -> None:
        with self._changed:
            if held.queued and first and held in self._queue:
                self._queue.remove(held)
                self._queue.appendleft(held)
            elif not held.queued:
                held.queued = True
                (self._queue.appendleft if first else self._queue.append)(held)
                self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopping.is_set():
                    self._changed.wait()
                if self._stopping.is_set():
                    return
                held = self._queue.popleft()
            trouble = ""
            seen: Identity | None = None
            try:
                handle = hashing.open_pin(held.place, held.pin)
                try:
                    seen = hashing.identity_of(os.fstat(handle))
                    if not held.is_small:
                        age_s = time.time() - seen.ctime_ns / 1e9
                        self._stopping.wait(min(_TICK_S, max(0.0, _TICK_S - age_s)))
                    if seen.size_bytes != (locked := held.pin.size_bytes):
                        raise FileUnfit(f"has {seen.size_bytes} bytes, locked are {locked}")
                    stop, hasher = self._stopping, held.pin.new_hash()
                    reading = hashing.read_open(handle, hasher, advance=self.advance, stop=stop)
                    if reading.digest != held.pin.want:
                        raise FileUnfit("does not have the locked bytes")
                    self._set(held, "proved", reading.identity, "")
                finally:
                    os.close(handle)
            except (FileUnfit, hashing.Moved) as reason:
                self._set(held, "wrong", seen, str(reason))
            except FileUnreadable as reason:
                trouble = str(reason)
            except OSError as error:
                trouble = _not_now(error)
            except Interrupted:
                return
            if trouble:
                # too many open files or a failing disk prove nothing about the bytes: a proof stays
                with self._changed:
                    held.trouble, held.queued = trouble, False
                    held.retries += 1
                    held.judged.set()
                if held.retries <= _MOST_RETRIES and held.state == "unproved":
                    self._stopping.wait(_RETRY_S)
                    self._enqueue(held, first=False)

    def _verdict(self, held: ServedFile) -> tuple[State, Identity | None, str]:
        """Read the verdict at one moment: half an old and half a new one would be wrong."""
        with self._changed:
            return held.state, held.seen, held.why

    def _set(self, held: ServedFile, state: State, seen: Identity | None, why: str) -> None:
        with self._changed:
            held.state, held.seen, held.why, held.queued = state, seen, why, False
            held.trouble, held.retries = "", 0
            held.judged.set()


def _not_now(error: OSError) -> str:
    return f"could not be read now ({error.strerror or error})"
