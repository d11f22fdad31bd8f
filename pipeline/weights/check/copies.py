"""Where right bytes come from when some are wrong, and putting a file together from them.

A set of 600 GB takes days to fetch. Before a file is fetched whole, its bytes are looked for where
they may well be: where a link in its place leads, in other files of its size below the same folder,
and in the Hub cache of this user. A copy counts when its hash is right.

The receipt's marks are what the hash was after each block. So it is known at each block whether
the bytes of the damaged file are right, and whether those of a source are.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.core.errors import DigestMismatch, Interrupted, SourceUnreachable
from pipeline.core.net.http import Client
from pipeline.weights.disk.hashing import BLOCK_BYTES, cores, mark_of, on_all_cores, read_file
from pipeline.weights.disk.survey import plain_size, walk
from pipeline.weights.model import FILE_HASH, FilePin
from pipeline.weights.place import Place, cache_name, user_cache
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.partial_file import Span, merged, missing, write_at
from pipeline.weights.transfer.router import Route

# Another copy of a set: the bytes of a file from start up to stop, or a `PipelineError`. Nothing of
# it is trusted before the hash is right.
Source = Callable[[FilePin, int, int], Iterator[bytes]]
_MOST_BLOCKS = 16  # in one request: 64 MB, as a fetch asks for


@dataclass
class RouteSupply:
    """Folders, neighbours and the Hub, as a fetch uses them."""

    routes: list[Route]
    client: Client

    def sources(self) -> list[Source]:
        """Each route by itself: one that has other bytes is passed over for the next."""
        return [partial(fetch_range, [route], client=self.client) for route in self.routes]

    def fetch(self, place: Place, pins: list[FilePin]) -> None:
        """Whole files, several and their ranges in parallel; raises a `PipelineError`."""
        fetch_files(place, pins, self.routes, client=self.client, again=True)

    def hang_up(self) -> None:
        """End all waiting, also for a server's next bytes."""
        self.client.hang_up()


def find_copies(
    place: Place, pins: Sequence[FilePin], judged: Collection[Path], stop: threading.Event
) -> dict[str, Path]:
    """By the wanted hash, a file that has it. What `judged` files hold is known already."""
    wanted = {pin.want for pin in pins}
    sizes = {pin.size_bytes for pin in pins} - {0}  # an empty file needs no copy
    by_size: dict[int, list[Path]] = {}
    # what is half fetched or half repaired is no copy
    unfinished = place.partial_folder.relative_to(place.root).as_posix()
    for path in (place.root / name for name in walk(place.root, [unfinished])):
        # a blob's name is its hash, so one with another name need not be read
        is_blob = path.parent.name == "blobs" and FILE_HASH.fullmatch(path.name)
        if path in judged or (is_blob and path.name not in wanted):
            continue
        with suppress(OSError):
            if (size := path.lstat().st_size) in sizes:
                by_size.setdefault(size, []).append(path)
    twins: dict[str, list[Path]] = {}  # two names of one content
    for pin in place.lock.files:
        twins.setdefault(pin.want, []).append(place.file(pin))
    candidates: dict[tuple[Path, bool], FilePin] = {}
    for pin in pins:
        own = place.file(pin)
        # where links in the file's place lead, and this user's Hub cache
        real = [(path, Path(os.path.realpath(path))) for path in (own, place.name(pin))]
        paths = [target for path, target in real if target != path.absolute()]
        paths.append(user_cache() / cache_name(place.lock) / "blobs" / pin.want)
        # such as the tokenizer that a repository also keeps in a sub-folder
        paths += [path for path in twins[pin.want] if path != own]
        for path in (*paths, *by_size.get(pin.size_bytes, [])):
            if plain_size(path) == pin.size_bytes:
                # the same file may be wanted by SHA-256 and, under another name, by git's hash
                candidates[path, pin.sha256 is None] = pin
    by_digest: dict[str, Path] = {}

    def check(item: tuple[Path, FilePin]) -> None:
        with suppress(OSError):
            by_digest[read_file(item[0], item[1].new_hash(), stop=stop).digest] = item[0]

    on_all_cores(check, [(path, pin) for (path, _), pin in candidates.items()], cores(), stop.set)
    return {digest: path for digest, path in by_digest.items() if digest in wanted}


@dataclass(frozen=True)
class NewFile:
    """A file that is put together beside the one it is to replace; its hash decides at the end."""

    pin: FilePin
    path: Path
    stop: threading.Event

    def is_right(self) -> bool:
        """Whether it has the locked bytes."""
        if plain_size(self.path) != self.pin.size_bytes:
            return False
        try:
            return read_file(self.path, self.pin.new_hash(), stop=self.stop).digest == self.pin.want
        except OSError:
            return False

    def copy(self, source: Path, n_bytes: int) -> None:
        """Begin anew, with the first bytes of another file."""
        self.path.unlink(missing_ok=True)
        with open_both(source, self.path, self.pin.size_bytes) as (taken, made):
            copy_range(taken, made, 0, n_bytes)
            os.fsync(made)

    def patch(self, damaged: Path, marks: tuple[str, ...], source: Source) -> list[Span] | None:
        """What is right of the damaged file, and the rest from a source; returns that rest.

        None where nothing of the file can be kept, or it is not known what.
        """
        size, size_now = self.pin.size_bytes, plain_size(damaged)
        if size_now is None:
            return None
        if marks:
            return self._patch_blocks(damaged, marks, source)
        # A file that was cut or grew may have kept its beginning; one that changed may not. This
        # is a guess that saves bytes: what it leaves wrong, the hash of the whole file shows.
        if size_now in (0, size):
            return None
        self.copy(damaged, min(size_now, size))
        ranges = [(size_now, size)] if size_now < size else []
        self._fill(source, ranges)
        return ranges

    def _patch_blocks(
        self, damaged: Path, marks: tuple[str, ...], source: Source
    ) -> list[Span] | None:
        """The ranges that were fetched; None where the marks or the source's bytes do not fit."""
        size, hasher = self.pin.size_bytes, self.pin.new_hash()
        asked, held = list[Span](), list[Span]()
        if len(marks) != -(-size // BLOCK_BYTES):
            return None
        # what a killed run left may be used; a hard link to a file that is kept may not
        with suppress(FileNotFoundError):
            if self.path.lstat().st_nlink != 1:
                self.path.unlink()

        def fits(at: int, data: bytes) -> bool:
            """Whether these are the bytes of the block at this place; if so, they count."""
            nonlocal hasher
            if len(data) != min(BLOCK_BYTES, size - at):
                return False
            # a wrong block must not enter the hash: other bytes for it are tried next
            ahead = hasher.copy()
            ahead.update(data)
            if mark_of(ahead) != marks[at // BLOCK_BYTES]:
                return False
            hasher = ahead
            return True

        with open_both(damaged, self.path, size) as (taken, made):
            at = bad_blocks = 0
            while at < size:
                stop = min(at + BLOCK_BYTES, size)
                if fits(at, _read_block(taken, at, stop)):
                    bad_blocks = 0
                elif fits(at, _read_block(made, at, stop)):  # of a run that was killed
                    held.append((at, stop))
                else:
                    # no more at once than was bad already: at most half of what comes was right
                    blocks = min(max(bad_blocks, 1), _MOST_BLOCKS)
                    stop = min(at + blocks * BLOCK_BYTES, size)
                    asked.append((at, stop))
                    for block in _blocks(self._pieces(source, at, stop)):
                        if not fits(at, block):
                            return None
                        write_at(made, block, at)
                        at += len(block)
                        bad_blocks += 1
                at = stop
            for start, stop in missing(merged([*asked, *held]), size):
                copy_range(taken, made, start, stop)
            os.fsync(made)
        return merged(asked)

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
                for data in self._pieces(source, start, stop):
                    write_at(handle, data, start)
                    start += len(data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _pieces(self, source: Source, start: int, stop: int) -> Iterator[bytes]:
        """All of a range, and nothing beyond it."""
        at = start
        for data in source(self.pin, start, stop):
            if self.stop.is_set():
                raise Interrupted("stopped")
            # a source that sends too much would overwrite the good block after the range
            yield data[: max(0, stop - at)]
            at += len(data)
        if at != stop:
            raise SourceUnreachable(
                f"{self.pin.path}: {at - start} bytes came, {stop - start} were asked for"
            )


def _read_block(handle: int, start: int, stop: int) -> bytes:
    try:
        return os.pread(handle, stop - start, start)
    except OSError:  # a bad sector costs its block, not the file
        return b""


def _blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= BLOCK_BYTES:
            yield bytes(held[:BLOCK_BYTES])
            del held[:BLOCK_BYTES]
    if held:
        yield bytes(held)


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
