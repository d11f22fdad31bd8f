"""Parts of a file: what must come anew, what lies between, and copying that."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.weights.disk.hashing import BLOCK_BYTES

Range = tuple[int, int]  # from, up to


def wrong_by_size(size_bytes: int, size_now: int) -> list[Range]:
    """A file that was cut or grew may have kept its beginning; one that changed may not.

    This is a guess that saves bytes. What it leaves wrong, the hash of the whole file shows.
    """
    if size_now == size_bytes:
        return [(0, size_bytes)]
    return [(size_now, size_bytes)] if size_now < size_bytes else []


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Neighbouring ranges as one."""
    done: list[Range] = []
    for start, stop in ranges:
        if done and done[-1][1] == start:
            done[-1] = (done[-1][0], stop)
        else:
            done.append((start, stop))
    return done


def rest_of(size_bytes: int, ranges: list[Range]) -> list[Range]:
    """What lies between some ranges."""
    starts = [0, *(stop for _, stop in ranges)]
    stops = [*(start for start, _ in ranges), size_bytes]
    return [(a, b) for a, b in zip(starts, stops, strict=True) if a < b]


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
