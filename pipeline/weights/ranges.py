"""Which bytes of a damaged file are wrong, and copying those that are not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from isal import isal_zlib

from pipeline.weights.hashing import BLOCK_BYTES

Range = tuple[int, int]  # from, up to
_NO_SUM = -1  # of a block that the disk does not give


def wrong_ranges(
    size_bytes: int, size_now: int, wanted: tuple[int, ...], found: tuple[int, ...]
) -> list[Range]:
    """What must come anew: by block checksums where there are some, else by size alone.

    This is a guess that saves bytes. What it leaves wrong, the hash of the whole file shows.
    """
    count = -(-size_bytes // BLOCK_BYTES)
    if len(wanted) != count:
        return _by_size(size_bytes, size_now)
    bad = [i for i in range(count) if i >= len(found) or found[i] != wanted[i]]
    return joined((i * BLOCK_BYTES, min(size_bytes, (i + 1) * BLOCK_BYTES)) for i in bad)


def _by_size(size_bytes: int, size_now: int) -> list[Range]:
    """A file that was cut or grew may have kept its beginning; one that changed may not."""
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


def block_sums(path: Path) -> tuple[int, ...]:
    """The checksum of each block, also around bad sectors: a block that cannot be read is wrong."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        size = os.fstat(handle).st_size
        return tuple(_sum_at(handle, at) for at in range(0, size, BLOCK_BYTES))
    finally:
        os.close(handle)


def _sum_at(handle: int, at: int) -> int:
    try:
        return int(isal_zlib.crc32(os.pread(handle, BLOCK_BYTES, at)))
    except OSError:
        return _NO_SUM


def copy_ranges(source: Path, target: Path, ranges: list[Range], size_bytes: int) -> None:
    """A new file with these ranges of another; disks that can, share them instead of copying."""
    target.unlink(missing_ok=True)
    taken = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) if ranges else -1
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        os.ftruncate(made, size_bytes)
        for start, stop in ranges:
            _copy(taken, made, start, stop)
    finally:
        os.close(made)
        if ranges:
            os.close(taken)


def _copy(taken: int, made: int, start: int, stop: int) -> None:
    with suppress(OSError):
        while start < stop:
            count = os.copy_file_range(taken, made, min(stop - start, 1 << 30), start, start)
            if not count:
                break
            start += count
    while start < stop and (data := os.pread(taken, min(stop - start, BLOCK_BYTES), start)):
        os.pwrite(made, data, start)
        start += len(data)
