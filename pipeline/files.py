"""Files that are either whole or not there, and locks that die with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import DiskFull, PipelineError, StoreUnwritable


@contextmanager
def os_errors_explained(where: Path) -> Iterator[None]:
    """Turn the disk's refusals into our own endings."""
    try:
        yield
    except OSError as error:
        raise explained(error, where) from error


def explained(error: OSError, where: Path) -> PipelineError:
    """The ending that belongs to an error number; what has none is raised as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{where}: no space left")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StoreUnwritable(f"{where}: {os.strerror(error.errno)}")
    raise error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete."""
    with os_errors_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole, leaving it alone when it already says the same."""
    if path.exists() and path.read_bytes() == data:
        return
    with atomic_file(path) as out:
        out.write(data)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Only one process at a time past this point (or many readers, when shared).

    The kernel frees the lock however its process ends.
    """
    with os_errors_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def is_free(path: Path) -> bool:
    """Whether no living process holds this lock."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
