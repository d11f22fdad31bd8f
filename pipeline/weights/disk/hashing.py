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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import Interrupted
from pipeline.core.files import folder_below
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder

BLOCK_BYTES = 4 << 20  # what a repair fetches for one wrong byte
MARK_CHARS = 16  # 64 bits tell the blocks of a file apart
_READ_BYTES = 1 << 20  # enough for the disk, and still in the core's own cache when it is hashed
_WINDOW_BYTES = 16 << 20  # the step for giving back page cache and for the progress bar

Advance = Callable[[int], None]
# Never through a link; and opening a pipe would otherwise wait for its other end.
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


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
# These are about the file. All others (also EIO, ESTALE) are about the machine.
_FILE_ERRORS = {
    *(errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
}


class Moved(OSError):
    """A file that changed, or was replaced, during the read."""


@dataclass(frozen=True)
class FileReading:
    """One pass over a file."""

    digest: str
    marks: tuple[str, ...]
    identity: Identity


def identity_of(status: os.stat_result) -> Identity:
    """A file's identity as the disk states it."""
    s = status
    return Identity(s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev)


def hash_file(
    path: Path,
    hasher: hashlib._Hash,
    *,
    advance: Advance = lambda n_bytes: None,
    stop: threading.Event | None = None,
    direct: bool = False,
) -> FileReading:
    """Hash a file; `direct` asks the disk itself, not the memory that caches it."""
    handle = -1
    if direct:
        with suppress(OSError), mmap.mmap(-1, _READ_BYTES) as probe:
            # a page in memory is no proof of the disk: rot below it would pass (open(2))
            handle = os.open(path, READ_FLAGS | os.O_DIRECT)
            # some file systems accept O_DIRECT when opening and fail when reading
            try:
                os.preadv(handle, [probe], 0)
            except OSError:
                os.close(handle)
                handle = -1
    # what is read past the page cache leaves nothing there to give back
    give_back = handle < 0
    if give_back:
        handle = os.open(path, READ_FLAGS)
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


def read_open(
    handle: int,
    hasher: hashlib._Hash,
    *,
    advance: Advance = lambda n_bytes: None,
    stop: threading.Event | None = None,
    give_back: bool = False,
) -> FileReading:
    """Hash an open file; `give_back` keeps the page cache from growing by it."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise NotPlain("is not a file any more")
    before, marked = identity_of(status), MarkedHash(hasher)
    windows = range(0, before.size_bytes, _WINDOW_BYTES)
    uncached = set()  # somebody uses the other windows, so they stay in the page cache
    try:
        for start in windows if give_back else ():
            middle = start + min(_WINDOW_BYTES, before.size_bytes - start) // 2
            try:
                os.preadv(handle, [bytearray(1)], middle, os.RWF_NOWAIT)
            except BlockingIOError:
                uncached.add(start)
    except OSError:  # the file system does not support the question: leave its cache alone
        uncached.clear()
    with memoryview(mmap.mmap(-1, _READ_BYTES)) as buffer:  # on a page's border, for O_DIRECT
        for start in windows:
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
    return FileReading(marked.digest, marked.marks, before)


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


class FileUnfit(Exception):
    """Why a file cannot be taken for the locked one."""


class FileUnreadable(Exception):
    """Why the machine could not read a file now; it proves nothing about the file's bytes."""


def open_pin(place: LockedFolder, pin: FilePin) -> int:
    """Open a locked file without following links, so that nothing outside its folder is read."""
    root, path = place.root.resolve(), place.file(pin)
    return open_below(root, path.relative_to(place.root).as_posix())


def open_below(root: Path, relative: str) -> int:
    """A plain file below a folder; neither it nor a folder on the way may be a link."""
    *folders, last = relative.split("/")
    try:
        # folder by folder: O_NOFOLLOW of a whole path would only refuse a link at its end
        with folder_below(root, folders) as folder:
            handle = os.open(last, READ_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        raise FileUnfit("is missing") from None
    except OSError as error:
        if error.errno not in _FILE_ERRORS:
            raise FileUnreadable(f"could not be opened now ({error.strerror})") from None
        raise FileUnfit(f"cannot be opened as a plain file ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileUnfit("is not a plain file")
    return handle
