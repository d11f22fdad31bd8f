"""A new file from a damaged file's good blocks and a source's bytes for the others.

The receipt's marks are what the hash was after each block. So it is known at each block whether
the bytes here are right, and whether those of a source are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.weights.disk.hashing import BLOCK_BYTES, Hasher, mark_of
from pipeline.weights.transfer.partial_file import Span, merged, missing

_MOST_BLOCKS = 16  # in one request: 64 MB, as a fetch asks for

Ask = Callable[[int, int], Iterator[bytes]]


def patch_file(
    damaged: Path, new: Path, size_bytes: int, hasher: Hasher, marks: tuple[str, ...], ask: Ask
) -> list[Span] | None:
    """The ranges that were fetched; None where the marks or the source's bytes do not fit.

    The caller checks the hash of the new file as a whole.
    """
    if len(marks) != -(-size_bytes // BLOCK_BYTES):
        return None
    with open_both(damaged, new, size_bytes) as (taken, made):
        walk = _Walk(taken, made, size_bytes, hasher, marks, ask)
        if not walk.to_the_end():
            return None
        for start, stop in missing(merged([*walk.asked, *walk.held]), size_bytes):
            copy_range(taken, made, start, stop)
        os.fsync(made)
    return merged(walk.asked)


class _Walk:
    """Block by block; damage that continues is fetched in longer and longer steps."""

    def __init__(
        self,
        taken: int,
        made: int,
        size_bytes: int,
        hasher: Hasher,
        marks: tuple[str, ...],
        ask: Ask,
    ) -> None:
        self._taken, self._made, self._size_bytes = taken, made, size_bytes
        self._hasher, self._marks, self._ask = hasher, marks, ask
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
            os.pwrite(self._made, block, at)
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
            count = os.copy_file_range(taken, made, min(stop - start, 1 << 30), start, start)
            if not count:
                break
            start += count
    while start < stop and (data := os.pread(taken, min(stop - start, BLOCK_BYTES), start)):
        os.pwrite(made, data, start)
        start += len(data)
