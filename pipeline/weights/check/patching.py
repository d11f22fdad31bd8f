"""A damaged file's good blocks and a source's bytes for the others, put together as a new file.

The receipt's marks say what the hash was after each block. So the walk knows at each block whether
the bytes here are right, and whether those that a source gave are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.weights.check.ranges import Range, copy_range, joined, open_both, rest_of
from pipeline.weights.disk.hashing import BLOCK_BYTES, Hasher, mark_of

_MOST_BLOCKS = 16  # asked for at once

Ask = Callable[[int, int], Iterator[bytes]]


def patch_file(
    damaged: Path, new: Path, size_bytes: int, hasher: Hasher, marks: tuple[str, ...], ask: Ask
) -> list[Range] | None:
    """The ranges that had to be asked for; None where the marks or the source are not to be had.

    The caller judges the new file as a whole.
    """
    if len(marks) != -(-size_bytes // BLOCK_BYTES):
        return None
    with open_both(damaged, new, size_bytes) as (taken, made):
        walk = _Walk(taken, made, size_bytes, hasher, marks, ask)
        if not walk.to_the_end():
            return None
        for start, stop in rest_of(size_bytes, sorted([*walk.asked, *walk.held])):
            copy_range(taken, made, start, stop)
        os.fsync(made)
    return joined(walk.asked)


class _Walk:
    """Block by block; damage that goes on is asked for in longer and longer steps."""

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
        self.asked: list[Range] = []
        self.held: list[Range] = []  # in the new file already

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
