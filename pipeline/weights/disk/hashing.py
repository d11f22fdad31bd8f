"""Reading a file once, at the disk's speed: its hash, and what the hash was after each block.

The hash at the end is the proof. Those on the way, the marks, show later *where* a file has
changed. They are free, for the hash passes through them anyway (a CRC of each block took 5 % more).
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.core.errors import Interrupted

BLOCK_BYTES = 4 << 20  # what a repair fetches for one wrong byte
MARK_CHARS = 16  # 64 bits tell the blocks of a file apart
_READ_BYTES = 1 << 20  # enough for the disk, and still in the core's own cache when it is hashed
_WINDOW_BYTES = 16 << 20  # the step for giving back page cache and for the progress bar

Advance = Callable[[int], None]
Item = TypeVar("Item")


class Identity(NamedTuple):
    """What changes when a file is written to, replaced, or is another file."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class NotPlain(OSError):
    """Something other than a file: a folder, a pipe, a device."""


# Errors of the machine, not of a file: they prove nothing about the file's bytes.
MACHINE_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Moved(OSError):
    """A file that was changed or replaced while it was read."""


@dataclass(frozen=True)
class Reading:
    """One pass over a file."""

    digest: str
    marks: tuple[str, ...]
    identity: Identity


def identity_of(status: os.stat_result) -> Identity:
    """A file's identity as the disk states it."""
    s = status
    return Identity(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)


def read_file(
    path: Path,
    hasher: hashlib._Hash,
    *,
    advance: Advance = lambda n_bytes: None,
    stop: threading.Event | None = None,
    direct: bool = False,
) -> Reading:
    """Hash a file; `direct` asks the disk itself, not the memory that caches it."""
    # never through a link, and never blocking on a pipe
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = _open_direct(path, flags) if direct else None
    # what is read past the page cache leaves nothing there to give back
    give_back = handle is None
    if handle is None:
        handle = os.open(path, flags)
        with suppress(OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            if direct:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        reading = read_open(handle, hasher, advance=advance, stop=stop, give_back=give_back)
        # the open file may be unchanged while another was moved to its name
        if identity_of(os.lstat(path)) != reading.identity:
            raise Moved("changed while it was read")
    finally:
        os.close(handle)
    return reading


def _open_direct(path: Path, flags: int) -> int | None:
    """Past the page cache, where the file system can; errors of the file itself show later."""
    try:
        # a page in memory is no proof of the disk: rot below it would pass (open(2))
        handle = os.open(path, flags | os.O_DIRECT)
    except OSError:
        return None
    try:
        # some file systems accept O_DIRECT when opening and fail when reading
        with mmap.mmap(-1, _READ_BYTES) as probe:
            os.preadv(handle, [probe], 0)
    except OSError:
        os.close(handle)
        return None
    return handle


def read_open(
    handle: int,
    hasher: hashlib._Hash,
    *,
    advance: Advance = lambda n_bytes: None,
    stop: threading.Event | None = None,
    give_back: bool = False,
) -> Reading:
    """Hash an open file; `give_back` leaves no more of it in the page cache than there was."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise NotPlain("is not a file any more")
    before, marked = identity_of(status), MarkedHash(hasher)
    uncached = _uncached_windows(handle, before.size_bytes) if give_back else set()
    with memoryview(mmap.mmap(-1, _READ_BYTES)) as buffer:  # on a page's border, for O_DIRECT
        for start in range(0, before.size_bytes, _WINDOW_BYTES):
            end = min(start + _WINDOW_BYTES, before.size_bytes)
            while marked.at < end:
                if stop is not None and stop.is_set():
                    raise Interrupted("stopped")
                count = min(os.preadv(handle, [buffer], marked.at), end - marked.at)
                if count <= 0:
                    raise Moved("became shorter while it was read")
                marked.update(buffer[:count])
            advance(end - start)
            # reading 600 GB must not push an engine's own files out of memory
            if start in uncached:
                with suppress(OSError):
                    os.posix_fadvise(handle, start, end - start, os.POSIX_FADV_DONTNEED)
    if identity_of(os.fstat(handle)) != before:
        raise Moved("changed while it was read")
    return Reading(marked.digest, marked.marks, before)


def _uncached_windows(handle: int, size_bytes: int) -> set[int]:
    """Which windows are not in the page cache; the others are in use and must stay there."""
    probe = bytearray(1)
    uncached = set()
    for window in range(0, size_bytes, _WINDOW_BYTES):
        middle = window + min(_WINDOW_BYTES, size_bytes - window) // 2
        try:
            os.preadv(handle, [probe], middle, os.RWF_NOWAIT)
        except BlockingIOError:
            uncached.add(window)
        except OSError:  # the file system does not support the question: leave its cache alone
            return set()
    return uncached


class MarkedHash:
    """A hash of bytes in order, and its marks on the way."""

    def __init__(self, hasher: hashlib._Hash) -> None:
        self._hasher, self._marks = hasher, list[str]()
        self.at = 0

    def update(self, data: memoryview | bytes) -> None:
        """The bytes that come next, however many."""
        rest = memoryview(data)
        while rest:
            piece = rest[: BLOCK_BYTES - self.at % BLOCK_BYTES]
            self._hasher.update(piece)
            self.at += len(piece)
            if self.at % BLOCK_BYTES == 0:
                self._marks.append(mark_of(self._hasher))
            rest = rest[len(piece) :]

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    @property
    def marks(self) -> tuple[str, ...]:
        """One for each block, the last of which may be short."""
        last = [mark_of(self._hasher)] if self.at % BLOCK_BYTES else []
        return (*self._marks, *last)


def mark_of(hasher: hashlib._Hash) -> str:
    """The hash of all bytes so far, cut short: enough to tell blocks apart, no proof."""
    return hasher.hexdigest()[:MARK_CHARS]


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) or 1


def on_all_cores(
    work: Callable[[Item], object], items: list[Item], jobs: int, halt: Callable[[], None]
) -> None:
    """Do the work in threads, in order of the list; Ctrl-C and errors halt all of them.

    hashlib and the kernel let go of the interpreter's lock, so threads fill all cores.
    """
    pool = ThreadPoolExecutor(max(1, min(jobs, len(items))))
    try:
        # all are submitted before the first result is awaited, else they would run one by one
        for future in [pool.submit(work, item) for item in items]:
            future.result()
    except BaseException:
        halt()
        raise
    finally:
        # waits for what runs: no thread may read on after the caller has closed its files
        pool.shutdown(cancel_futures=True)
