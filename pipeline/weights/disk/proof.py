"""Proving an open file: its bytes are hashed while its identity stays the same."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

from pipeline.core.files import folder_below
from pipeline.weights.disk.hashing import Advance, Identity, Moved, identity_of, read_open
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place

# These are about the file. All others (EMFILE, ENFILE, ENOMEM, EIO, ESTALE) are about the machine.
_FILE_ERRORS = {
    *(errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
}
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileUnfit(Exception):
    """Why a file cannot be taken for the locked one."""


class FileUnreadable(Exception):
    """Why the machine could not read a file now; it proves nothing about the file's bytes."""


def identity(handle: int) -> Identity:
    """The identity of an open file."""
    return identity_of(os.fstat(handle))


def open_pin(place: Place, pin: FilePin) -> int:
    """The file, opened without following any link, so that nothing outside its folder is read."""
    root, path = place.root.resolve(), place.file(pin)
    return open_below(root, path.relative_to(place.root).as_posix())


def open_below(root: Path, relative: str) -> int:
    """A plain file below a folder; neither it nor a folder on the way may be a link."""
    *folders, last = relative.split("/")
    try:
        # folder by folder: O_NOFOLLOW of a whole path would only refuse a link at its end
        with folder_below(root, folders) as folder:
            # O_NONBLOCK: opening a pipe would otherwise wait for its other end
            handle = os.open(last, _FLAGS, dir_fd=folder)
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


def check_open(handle: int, pin: FilePin, advance: Advance, stop: threading.Event) -> Identity:
    """Prove an open file against its pin; returns what it was then."""
    if (got := os.fstat(handle).st_size) != pin.size_bytes:
        raise FileUnfit(f"has {got} bytes, locked are {pin.size_bytes}")
    try:
        reading = read_open(handle, pin.new_hash(), advance=advance, stop=stop)
    except Moved as error:
        raise FileUnfit(str(error)) from None
    if reading.digest != pin.want:
        raise FileUnfit("does not have the locked bytes")
    return reading.identity


def read_checked(handle: int, pin: FilePin) -> bytes:
    """A small file's bytes, hashed as they are handed out."""
    # one byte more than is locked shows a file that grew
    data = os.pread(handle, pin.size_bytes + 1, 0)
    wanted = pin.new_hash()
    wanted.update(data)
    if len(data) != pin.size_bytes:
        raise FileUnfit(f"does not have the locked {pin.size_bytes} bytes")
    if wanted.hexdigest() != pin.want:
        raise FileUnfit("does not have the locked bytes")
    return data
