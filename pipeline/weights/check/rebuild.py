"""Putting a file together: from a copy, from good blocks and fetched ranges, or fetched whole.

The receipt's marks are what the hash was after each block. So it is known at each block whether
the bytes here are right, and whether those of a source are.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.errors import DigestMismatch, Interrupted, SourceUnreachable
from pipeline.weights.check.copies import Source
from pipeline.weights.disk.hashing import BLOCK_BYTES, mark_of, read_file
from pipeline.weights.model import FilePin
from pipeline.weights.transfer.partial_file import Span, merged, missing, write_at

_MOST_BLOCKS = 16  # in one request: 64 MB, as a fetch asks for

Ask = Callable[[int, int], Iterator[bytes]]


@dataclass(frozen=True)
class NewFile:
    """A file that is put together beside the one it is to replace; its hash decides at the end."""

    pin: FilePin
    path: Path
    stop: threading.Event

    def is_right(self) -> bool:
        """Whether it has the locked bytes."""
        try:
            if self.path.lstat().st_size != self.pin.size_bytes:
                return False
            return read_file(self.path, self.pin.new_hash(), stop=self.stop).digest == self.pin.want
        except OSError:
            return False

    def copy(self, source: Path, ranges: list[Span]) -> None:
        """Begin anew, with some ranges of another file."""
        self.path.unlink(missing_ok=True)
        with open_both(source, self.path, self.pin.size_bytes) as (taken, made):
            for start, stop in ranges:
                copy_range(taken, made, start, stop)
            os.fsync(made)

    def patch(self, damaged: Path, marks: tuple[str, ...], source: Source) -> list[Span] | None:
        """What is right of the damaged file, and the rest from a source; returns that rest.

        None where nothing of the file can be kept, or it is not known what.
        """
        size_bytes = self.pin.size_bytes
        try:
            status = os.lstat(damaged)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        if marks:
            self._drop_hard_link()
            ask = partial(self._pieces, source)
            return patch_file(damaged, self.path, self.pin, marks, ask)
        ranges = wrong_by_size(size_bytes, status.st_size)
        if ranges == [(0, size_bytes)]:
            return None
        self.copy(damaged, missing(ranges, size_bytes))
        self._fill(source, ranges)
        return ranges

    def _drop_hard_link(self) -> None:
        """What a killed run left may be used; a hard link to a file that is kept may not."""
        with suppress(FileNotFoundError):
            if self.path.lstat().st_nlink != 1:
                self.path.unlink()

    def fetch_whole(self, source: Source) -> int:
        """Goes on where a killed run stopped; once more from the start if that proves wrong."""
        fetched, size_bytes = 0, self.pin.size_bytes
        for again in (True, False):
            begun = self.path.stat().st_size if again and self.path.exists() else 0
            if not 0 < begun < size_bytes or self.path.stat().st_nlink != 1:
                self.path.unlink(missing_ok=True)
                begun = 0
            self._fill(source, [(begun, size_bytes)])
            fetched += size_bytes - begun
            if self.is_right():
                return fetched
            self.path.unlink()
            if not begun:
                break
        raise DigestMismatch(f"{self.pin.path}: the source has other bytes than the lock names")

    def _fill(self, source: Source, ranges: list[Span]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o644)
        try:
            for start, stop in ranges:
                at = start
                for data in self._pieces(source, start, stop):
                    write_at(handle, data, at)
                    at += len(data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _pieces(self, source: Source, start: int, stop: int) -> Iterator[bytes]:
        """All of a range, and nothing beyond it."""
        at = start
        for data in source(self.pin, start, stop):
            if self.stop.is_set():
                raise Interrupted("stopped")
            # a source that sends too much would overwrite the good block behind the range
            yield data[: max(0, stop - at)]
            at += len(data)
        if at != stop:
            raise SourceUnreachable(
                f"{self.pin.path}: {at - start} bytes came, {stop - start} were asked for"
            )


def patch_file(
    damaged: Path, new: Path, pin: FilePin, marks: tuple[str, ...], ask: Ask
) -> list[Span] | None:
    """The ranges that were fetched; None where the marks or the source's bytes do not fit.

    The caller checks the hash of the new file as a whole.
    """
    size_bytes = pin.size_bytes
    if len(marks) != -(-size_bytes // BLOCK_BYTES):
        return None
    with open_both(damaged, new, size_bytes) as (taken, made):
        walk = _Walk(taken, made, pin, marks, ask)
        if not walk.to_the_end():
            return None
        for start, stop in missing(merged([*walk.asked, *walk.held]), size_bytes):
            copy_range(taken, made, start, stop)
        os.fsync(made)
    return merged(walk.asked)


class _Walk:
    """Block by block; damage that continues is fetched in longer and longer steps."""

    def __init__(
        self, taken: int, made: int, pin: FilePin, marks: tuple[str, ...], ask: Ask
    ) -> None:
        self._taken, self._made, self._size_bytes = taken, made, pin.size_bytes
        self._hasher, self._marks, self._ask = pin.new_hash(), marks, ask
        self._bad_so_far = 0  # blocks in a row
        self.asked: list[Span] = []
        self.held: list[Span] = []  # in the new file already

    def to_the_end(self) -> bool:
        at = 0
        while at < self._size_bytes:
            if self._goes_on_with(at, self._read(self._taken, at)):
                at = self._after(at)
                self._bad_so_far = 0
            elif self._goes_on_with(at, self._read(self._made, at)):  # of a run that was killed
                self.held.append((at, self._after(at)))
                at = self._after(at)
            elif (after := self._fetch(at)) is not None:
                at = after
            else:
                return False
        return True

    def _after(self, at: int) -> int:
        return min(at + BLOCK_BYTES, self._size_bytes)

    def _read(self, handle: int, at: int) -> bytes:
        try:
            return os.pread(handle, self._after(at) - at, at)
        except OSError:  # a bad sector costs its block, not the file
            return b""

    def _goes_on_with(self, at: int, data: bytes) -> bool:
        """Whether these are the bytes of the block there; if so, they count."""
        if len(data) != self._after(at) - at:
            return False
        # a wrong block must not enter the hash: other bytes for it are tried next
        ahead = self._hasher.copy()
        ahead.update(data)
        if mark_of(ahead) != self._marks[at // BLOCK_BYTES]:
            return False
        self._hasher = ahead
        return True

    def _fetch(self, at: int) -> int | None:
        """No more at once than was bad already, so at most half of what comes was right here."""
        blocks = min(max(self._bad_so_far, 1), _MOST_BLOCKS)
        stop = min(at + blocks * BLOCK_BYTES, self._size_bytes)
        self.asked.append((at, stop))
        for block in _blocks(self._ask(at, stop)):
            if not self._goes_on_with(at, block):
                return None
            write_at(self._made, block, at)
            at += len(block)
            self._bad_so_far += 1
        return at


def _blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= BLOCK_BYTES:
            yield bytes(held[:BLOCK_BYTES])
            del held[:BLOCK_BYTES]
    if held:
        yield bytes(held)


def wrong_by_size(size_bytes: int, size_now: int) -> list[Span]:
    """A file that was cut or grew may have kept its beginning; one that changed may not.

    This is a guess that saves bytes. What it leaves wrong, the hash of the whole file shows.
    """
    if size_now == size_bytes:
        return [(0, size_bytes)]
    return [(size_now, size_bytes)] if size_now < size_bytes else []


@contextmanager
def open_both(taken: Path, made: Path, size_bytes: int) -> Iterator[tuple[int, int]]:
    """A file to read and one of that size to write, which keeps what it holds already.

    Never through a link, and never waiting for the other end of a pipe.
    """
    with ExitStack() as stack:
        source = os.open(taken, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, source)
        target = os.open(made, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        stack.callback(os.close, target)
        os.ftruncate(target, size_bytes)
        yield source, target


def copy_range(taken: int, made: int, start: int, stop: int) -> None:
    """Disks that can, share the bytes instead of copying them."""
    with suppress(OSError):
        while start < stop:
            # on btrfs and XFS a reflink: no bytes are read, and none written (copy_file_range(2))
            count = os.copy_file_range(taken, made, min(stop - start, 1 << 30), start, start)
            if not count:
                break
            start += count
    while start < stop and (data := os.pread(taken, min(stop - start, BLOCK_BYTES), start)):
        write_at(made, data, start)
        start += len(data)
