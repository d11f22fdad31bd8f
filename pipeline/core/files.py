"""Files that are either whole or not there, and locks that die with their process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import select
import shutil
import stat
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from pipeline.core.errors import DiskFull, InputInvalid, Interrupted, PipelineError, StoreUnwritable
from pipeline.core.log import say, seconds, size

Item = TypeVar("Item")
Result = TypeVar("Result")

# flock(2) has no time limit: who can be stopped asks again this often.
_ASK_AGAIN_S = 0.1
_PIECE_BYTES = 1 << 20
# For the first bytes of a pipe: whatever writes there has begun by then, and under CI, cron and ssh
# standard input is often a pipe that nobody writes to or closes.
FIRST_BYTES_S = 10.0
_GZIP = 16 + zlib.MAX_WBITS
# Errors that are about the place itself, so that trying again would not help.
ANOTHER_PLACE = "name another place (for the store: SM120_STORE)"
_IN_THE_WAY = f"Something of another kind is in the way: look at it, move it, or {ANOTHER_PLACE}."
_UNWRITABLE = {
    # no hint of their own: owner and mode, or another place
    **dict.fromkeys((errno.EACCES, errno.EPERM), ""),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP), _IN_THE_WAY),
    errno.EROFS: f"That disk can only be read: {ANOTHER_PLACE}.",
    errno.ENAMETOOLONG: "Name a place with a shorter path.",
    # also a disk that was pulled out, and a network file system whose server is gone
    errno.EIO: f"The disk or its connection fails: look into `dmesg`, then {ANOTHER_PLACE}.",
}


@contextmanager
def os_errors_explained(where: Path | None = None) -> Iterator[None]:
    """Turns the disk's refusals into errors of our own.

    They name the file themselves, but for writes to one that is open: there `where` names it.
    """
    try:
        yield
    except OSError as error:
        raise explained(error, where) from error


def explained(error: OSError, where: Path | None = None) -> PipelineError:
    """Turns an OSError into an error of our own; raises one that has no counterpart as it is."""
    # a move or a link writes to the second name
    named = where or error.filename2 or error.filename or "the output, or a file of this command"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{named}: no space left")
    if error.errno in _UNWRITABLE:
        return StoreUnwritable(f"{named}: {os.strerror(error.errno)}", _UNWRITABLE[error.errno])
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
                # before the rename: after a power cut a name must not stand for half a file
                os.fsync(out.fileno())
            # mkstemp makes it private, but a store may be shared by several users
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
            # and the name: a lock that was written must be there after the next boot
            sync(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a small file whole, leaving it alone when it holds the same already."""
    with suppress(OSError):
        if read_plain(path, len(data)) == data:
            return
    with atomic_file(path) as out:
        out.write(data)


def change_file(path: Path, lock: Path, most_bytes: int, change: Callable[[bytes], bytes]) -> None:
    """Rewrites a small file while no other process does; `change` gets b"" if it cannot be read."""
    with locked(lock):
        data = None
        with suppress(OSError):
            data = read_plain(path, most_bytes)
        write_bytes(path, change(data or b""))


def keep_file(partial: Path, final: Path) -> None:
    """Gives a finished file its name; it is on the same disk."""
    with os_errors_explained(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # a name stands for whole bytes and can be read by others: see `atomic_file`
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.chmod(0o644)
        os.replace(partial, final)


def files_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yields all but folders, however deep; follows no links and skips closed folders.

    Not `os.walk`, which calls itself for each level: a program may have made any number of them.
    """
    todo = [folder]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    todo.append(Path(entry.path))
                else:
                    yield entry


def remove_tree(folder: Path) -> None:
    """Removes a folder whatever a program made in it: any depth, any mode; as much as it can.

    `shutil.rmtree` calls itself for each level. Here a folder is moved to the top before it is
    emptied, so that neither the depth nor the length of a path has a limit.
    """
    # a name that the program which filled the folder could not have taken
    todo, prefix = [folder], f".{secrets.token_hex(8)}"
    while todo:
        current = todo.pop()
        with suppress(OSError):
            # a folder without these rights cannot be emptied, even by its owner
            current.chmod(0o700)
        with suppress(OSError):
            for entry in list(os.scandir(current)):
                with suppress(OSError):
                    path = Path(entry.path)
                    if not entry.is_dir(follow_symlinks=False):
                        path.unlink()
                        continue
                    if current != folder:
                        with suppress(OSError):
                            path.chmod(0o700)
                        path = path.rename(folder / f"{prefix}.{path.stat().st_ino}")
                    todo.append(path)
        if current != folder:
            with suppress(OSError):
                current.rmdir()
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def folder_below(top: Path, parts: Iterable[str], *, make: bool = False) -> Iterator[int]:
    """Opens a folder below another, for `dir_fd`; no part of its path may be a link.

    Opens each folder from the one above it: the system looks up a path anew at every use, and
    whoever filled the folder could have it lead elsewhere.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    handle = os.open(top, flags)
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = deeper
        yield handle
    finally:
        os.close(handle)


def read_plain(path: Path, most_bytes: int) -> bytes | None:
    """Reads a small file from a place that may hold anything; never waits for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    with os.fdopen(handle, "rb") as file:
        if info.st_size > most_bytes:
            return None
        data = file.read(most_bytes + 1)
    return data if len(data) <= most_bytes else None


def read_at_most(path: Path, most_bytes: int) -> bytes | None:
    """Reads a small file whole; none if it is larger than allowed, however large it is."""
    with path.open("rb") as handle:
        data = handle.read(most_bytes + 1)
    return data if len(data) <= most_bytes else None


def read_limited(
    path: Path,
    most_bytes: int,
    error: type[PipelineError],
    too_large: type[PipelineError] | None = None,
) -> bytes:
    """Reads a small file whole, or raises an error of this kind with the reason why it cannot."""
    # the error's own hint is about contents, and none were read
    try:
        data = read_at_most(path, most_bytes)
    except OSError as reason:
        message = f"{path}: cannot be read: {reason.strerror}"
        raise error(message, "Check that the file is there and that you may read it.") from reason
    if data is None:
        message, hint = f"{path}: larger than {most_bytes} bytes", "Check which file is named:"
        raise (too_large or error)(message, f"{hint} none of its kind is so large.")
    return data


def bounded_lines(file: BinaryIO, longest: int = 1 << 16) -> Iterator[str]:
    """Yields the lines of a log, however long one is: so many bytes of each, without the rest."""
    goes_on = False
    while piece := file.readline(longest):
        is_rest, goes_on = goes_on, not piece.endswith(b"\n")
        if not is_rest:
            yield piece.decode("utf-8", "replace")


def _small(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Cuts pieces: at the end of each member, what follows in its piece is copied."""
    most = 1 << 14
    return (piece[at : at + most] for piece in pieces for at in range(0, len(piece), most))


def gunzipped(pieces: Iterable[bytes], most_at_once: int) -> Iterator[bytes]:
    """Inflates gzip members in a row, a bounded piece at a time; EOFError where one is cut off."""
    engine, is_begun = zlib.decompressobj(_GZIP), False
    for data in _small(pieces):
        while data:
            # a gzip file is one or more members in a row (RFC 1952, 2.2)
            engine = zlib.decompressobj(_GZIP) if engine.eof else engine
            is_begun = True
            yield engine.decompress(data, most_at_once)
            data = engine.unused_data if engine.eof else engine.unconsumed_tail
    # what the last pieces hold beyond the bound
    while not engine.eof and (rest := engine.decompress(b"", most_at_once)):
        yield rest
    if is_begun and not engine.eof:
        raise EOFError("a gzip member is cut off")


def unpacked_zstd(pieces: Iterable[bytes], most_at_once: int) -> Iterator[bytes]:
    """Unpacks zstd frames in a row, a bounded piece at a time; EOFError where one is cut off."""
    # not at the top: only layers of foreign bases are packed so
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    # a frame may ask for a window of gigabytes; 128 MiB is what `zstd` itself takes without --long
    limits: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 27}
    engine, is_begun = zstd.ZstdDecompressor(options=limits), False
    try:
        for data in _small(pieces):
            while data or not (engine.eof or engine.needs_input):
                engine = zstd.ZstdDecompressor(options=limits) if engine.eof else engine
                is_begun = True
                yield engine.decompress(data, most_at_once)
                data = engine.unused_data if engine.eof else b""
    except zstd.ZstdError as error:
        raise zlib.error(str(error)) from error
    if is_begun and not engine.eof:
        raise EOFError("a zstd frame is cut off")


@contextmanager
def opened_log(path: Path, wait_s: float = FIRST_BYTES_S) -> Iterator[BinaryIO]:
    """Opens a log, a file or a pipe. A device has no end, and a pipe may have no writer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(handle).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise InputInvalid(f"{path}: is no file and no pipe", "Name a log.")
        if stat.S_ISFIFO(mode) and not select.select([handle], [], [], wait_s)[0]:
            message = f"{path}: nothing came through this pipe in {seconds(wait_s)}"
            raise InputInvalid(message, "Start what writes to it first, or name a file.")
        os.set_blocking(handle, True)
        yield file


def sha256_of_file(path: Path) -> str:
    """The digest of a file of any size, as every file of ours writes it."""
    with path.open("rb") as handle:
        return "sha256:" + hashlib.file_digest(handle, "sha256").hexdigest()


def is_whole(path: Path, digest: str, size_bytes: int) -> bool:
    """Whether a file is there with these bytes: a backup or a bad disk can leave others."""
    has_size = path.is_file() and path.stat().st_size == size_bytes
    return has_size and sha256_of_file(path) == digest


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def on_all_cores(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    halt: Callable[[], None] = lambda: None,
    jobs: int = 0,
) -> list[Result]:
    """Returns results in order; a failure or Ctrl-C ends it, and `halt` stops what still works.

    It uses threads, as it is meant for hashing, which releases the interpreter's lock.
    """
    with ThreadPoolExecutor(jobs or cores()) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            halt()
            # waits for what runs: no thread may read on after the caller has closed its files
            pool.shutdown(cancel_futures=True)
            raise


def size_so_far(partial: Path) -> int:
    """How many bytes of a file have come; 0 where there is none yet."""
    return partial.stat().st_size if partial.exists() else 0


def hash_so_far(partial: Path, advance: Callable[[int], None]) -> hashlib._Hash:
    """Hashes what has come of a file; the hash is ready for the rest."""
    sha = hashlib.sha256()
    if partial.exists():
        with partial.open("rb") as handle:
            while piece := handle.read(_PIECE_BYTES):
                sha.update(piece)
                advance(len(piece))
    return sha


def sync(path: Path) -> None:
    """Waits until a file's bytes, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unpacked_whole(data: bytes, most_bytes: int) -> bytes:
    """Unpacks what zlib packed; ValueError where it is damaged, cut off or too large."""
    engine = zlib.decompressobj()
    try:
        unpacked = engine.decompress(data, most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not engine.eof:
        raise ValueError("it is too large, or cut off")
    return unpacked


def link_or_copy(source: Path, target: Path) -> None:
    """The same bytes under another name: a hard link where the disk allows it, else a copy."""
    try:
        # free of copies of gigabytes; not across disks, and not on every file system
        # newer Pythons follow a link by default (https://github.com/python/cpython/issues/81793)
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copyfile(source, target)
        # a stick that is pulled out, or a power cut, must not leave a name without its bytes
        sync(target)


def free_bytes(folder: Path) -> int:
    """What this user may still write there; the folder may still have to be made."""
    # the blocks that are kept for root do not count
    return shutil.disk_usage(_nearest(folder)).free


def need_space(folder: Path, n_bytes: int) -> None:
    """Stops before the first byte if the disk cannot hold all bytes."""
    free = free_bytes(folder)
    if free < n_bytes:
        raise DiskFull(f"{folder}: {size(n_bytes)} needed, {size(free)} free")


def need_space_for_copies(source: Path, folder: Path, n_bytes: int) -> None:
    """As `need_space`, for what `link_or_copy` brings: links on the same disk take no space."""
    if source.stat().st_dev != _nearest(folder).stat().st_dev:
        need_space(folder, n_bytes)


def _nearest(folder: Path) -> Path:
    return next(p for p in (folder, *folder.absolute().parents) if p.exists())


@contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    stop: threading.Event | None = None,
    busy: PipelineError | None = None,
    waiting: str = "",
) -> Iterator[None]:
    """Lets one process at a time past this point (or many readers, when shared).

    The kernel frees the lock however its process ends. `stop` ends the wait of a thread; signals
    interrupt the main thread anyway. With `busy`, the error to raise when another process has
    the lock, nobody waits; `waiting` tells people why the process waits.
    """
    with os_errors_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # a lock that is there can be shared also where nothing can be written
        access = os.O_RDONLY if shared else os.O_RDWR
        # whatever is at the path: no wait for the other end of a pipe
        flags = access | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(path, flags, 0o666)
    try:
        can_wait = stop is None and busy is None and not waiting
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if can_wait else fcntl.LOCK_NB)
        while True:
            try:
                fcntl.flock(handle, kind)
                break
            except BlockingIOError:
                if busy is not None:
                    raise busy from None
                if waiting:
                    say(waiting)
                    waiting, kind = "", kind if stop else kind & ~fcntl.LOCK_NB
                if stop is not None and stop.wait(_ASK_AGAIN_S):
                    raise Interrupted("stopped") from None
        yield
    finally:
        os.close(handle)


def is_free(path: Path) -> bool:
    """Whether no living process holds this lock."""
    try:
        # a link in its place is not ours, so it counts as held
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True
