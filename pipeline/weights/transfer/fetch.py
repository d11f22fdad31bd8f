"""Fetch a locked set's files: in parallel, resumable, hashed as they arrive."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Literal

from pipeline.core import log
from pipeline.core.errors import DiskFull, SpecInvalid, StoreUnwritable
from pipeline.core.files import free_bytes, locked, os_errors_explained
from pipeline.core.model import Frozen
from pipeline.core.net.http import NetClient
from pipeline.weights.disk import receipt
from pipeline.weights.disk.install import install_file, link
from pipeline.weights.disk.receipt import proved_identities
from pipeline.weights.disk.survey import right_size
from pipeline.weights.model import FilePin
from pipeline.weights.place import STATE, LockedFolder, read_kept_lock
from pipeline.weights.transfer.peers import PeerGroup, PeerPool
from pipeline.weights.transfer.router import AttemptFailed, Attempts, Route, Router
from pipeline.weights.transfer.workers import Options, PartialFile, Throttle, WorkerPool, adopt

# filling a disk to its last byte makes other programs fail
LEAVE_FREE_BYTES = 64 << 20


def fetch_files(
    place: LockedFolder,
    pins: Sequence[FilePin],
    routes: Sequence[Route],
    *,
    client: NetClient,
    options: Options | None = None,
    begins: bool = True,
    group: PeerGroup | None = None,
) -> list[FilePin]:
    """Fetch every file that is not right yet; return the fetched ones.

    A file counts as right if a receipt proves it or its hash is right. One process
    at a time works on a place; unless it `begins` a set, its lock is not kept for the next run.
    Hosts of a `group` hand each other what they have verified.
    """
    place.require_own_state()
    waiting = "Another fetch is at work on this folder; waiting for it"
    with locked(place.state / "fetch.lock", stop=client.stop, waiting=waiting):
        # under the lock: another fetch may just have made it the folder of another set
        require_own_folder(place, pins)
        if begins:
            place.keep_lock(is_begun=True)
        right, wrong = receipt.files_here(place, pins, client.stop)
        todo = [pin for pin in pins if pin.path not in right]
        for pin in pins:
            if pin.path in right:
                link(place, pin)
            # another file's name has its bytes: fetch nothing for it
            elif (other := wrong.get(pin.want)) is not None:
                log.say(f"  {pin.path}: lies here as {other.path}")
                with os_errors_explained():
                    # as if just arrived: it is hashed once more, and gets its name as all others do
                    adopt(place.file(other), pin, place.partial_folder)
        if group is not None:
            group.have(pin.want for pin in pins if pin.path in right)
        if todo:
            _transfer(place, todo, routes, client, options or Options(), group)
        if group is not None:
            group.is_whole = True
        # partial files that no file of today's lock can become
        wants = {pin.want for pin in place.lock.files}
        for path in place.partial_folder.glob("*"):
            if path.name.partition(".")[0] not in wants:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            place.partial_folder.rmdir()
    return todo


def fetch_range(
    routes: Sequence[Route],
    pin: FilePin,
    start: int,
    stop: int,
    *,
    client: NetClient,
    options: Options | None = None,
) -> Iterator[bytes]:
    """Yield the bytes of one range, in order and complete; the caller must judge them."""
    chosen = options or Options()
    throttle = Throttle(chosen.limit_bytes_per_s, client.stop)
    attempts = Attempts(Router(routes), client.stop, chosen.first_wait_s)
    buffer = throttle.new_buffer()
    while start < stop:
        try:
            with closing(attempts.open(pin, start, stop)) as body:
                skip = start if body.is_whole else 0
                while skip:
                    skip -= body.readinto(buffer[:skip])
                while start < stop:
                    count = throttle.read(body, buffer[: stop - start])
                    attempts.received()
                    start += count
                    yield bytes(buffer[:count])
        except AttemptFailed as failure:
            attempts.failed(pin, failure)


def require_own_folder(place: LockedFolder, pins: Sequence[FilePin]) -> None:
    """Refuse a folder of another set, and names that cannot be written."""
    if place.lock_file.exists():
        held = read_kept_lock(place.lock_file)
        if (held.name, held.repository) != (place.lock.name, place.lock.repository):
            raise SpecInvalid(
                f"{place.root}: holds {held.name} of {held.repository}",
                "Choose another folder with --output: one folder, one set.",
            )
    if place.root.exists() and not place.root.is_dir():
        raise StoreUnwritable(f"{place.root}: is not a folder")
    folded: dict[str, str] = {}
    for pin in pins:
        other = folded.setdefault(pin.path.casefold(), pin.path)
        # such a disk finds our own folder under another spelling, too
        if other != pin.path and (place.root / STATE.upper()).exists():
            raise StoreUnwritable(
                f"{place.root}: {other} and {pin.path} are one file on this disk,"
                " which ignores letter case",
                "Fetch to another disk (ext4, XFS), or name one under `exclude` in the spec.",
            )
        if place.file(pin).is_dir() and not place.file(pin).is_symlink():
            raise StoreUnwritable(f"{place.file(pin)}: is a folder")
    folders = {path.parent for pin in pins for path in (place.file(pin), place.name(pin))}
    root = os.path.realpath(place.root)
    for folder in sorted({*folders, place.partial_folder}):
        real = Path(os.path.realpath(folder))
        # a link may lead to somebody else's file, and `verify` calls such files damaged
        if not real.is_relative_to(root):
            raise StoreUnwritable(
                f"{folder}: leads out of {place.root}, to {real}",
                "Move that link away, or name another folder with --output.",
            )
        standing = next(path for path in (real, *real.parents) if path.exists())
        if not standing.is_dir():
            raise StoreUnwritable(
                f"{standing}: is not a folder", "Move it, or choose another with --output."
            )


def _transfer(
    place: LockedFolder,
    pins: Sequence[FilePin],
    routes: Sequence[Route],
    client: NetClient,
    options: Options,
    group: PeerGroup | None,
) -> None:
    names: dict[str, list[FilePin]] = {}  # two names of one content are one download
    for pin in pins:
        names.setdefault(pin.want, []).append(pin)
    folder = place.partial_folder
    step, in_group = group.block_bytes if group else options.range_bytes, group is not None
    partials = [
        PartialFile(same[0], folder, step, whole_ranges=in_group) for same in names.values()
    ]
    fetched = sum(partial.kept_bytes for partial in partials)
    missing = sum(partial.pin.size_bytes for partial in partials) - fetched
    require_space(place.root, missing)

    def finish(partial: PartialFile) -> None:
        # Its last change is too fresh to tell it from one in the same tick of the clock. But a
        # write sets the mtime to now; so this sets it back to before the tick, by the disk's own
        # clock, which may not be ours.
        with suppress(OSError):
            status = partial.path.stat()
            before_ns = status.st_mtime_ns - 2 * receipt.CLOCK_TICK_NS
            os.utime(partial.path, ns=(status.st_atime_ns, before_ns))
        with os_errors_explained(partial.path):
            partial.sync()  # before it gets its name: a name must never lead to lost bytes
        same = names[partial.pin.want]
        install_file(place, partial.path, same)
        partial.forget()
        entries, marks = [], "".join(partial.hash.marks)
        for pin in same:
            identity = right_size(place.file(pin), pin)
            # not set back, or written to since: the receipt does not vouch for it
            if identity and identity.mtime_ns >= identity.ctime_ns - receipt.CLOCK_TICK_NS:
                identity = None
            entries.append(
                receipt.ReceiptEntry(path=pin.path, want=pin.want, identity=identity, marks=marks)
            )
        # one by one, so that a run which is killed leaves proof of what it finished
        writer.add(entries)

    more = f" ({log.size(fetched)} are here already)" if fetched else ""
    title = f"Fetching {log.count(len(partials), 'file')}, {log.size(missing)}{more}"
    saved = receipt.ReceiptWriter(place)
    with log.step(title), log.progress("weights", missing) as bar, saved as writer:
        work = partials, Router(routes), client, options, bar, finish
        (PeerPool(*work, group) if group else WorkerPool(*work)).run()


def require_space(root: Path, missing_bytes: int) -> None:
    """Refuse what the disk cannot hold, before the first byte."""
    free = free_bytes(root)
    if missing_bytes and missing_bytes + LEAVE_FREE_BYTES > free:
        raise DiskFull(
            f"{root}: {log.size(missing_bytes)} are to be fetched, {log.size(free)} are free, and"
            f" {log.size(LEAVE_FREE_BYTES)} must stay free",
            "Free some, or fetch to another disk; what is here already is kept and counted.",
        )


State = Literal["right", "to be read", "begun", "missing"]


class PlannedFile(Frozen):
    """One file: what is known of it, and how much of it is still to be fetched."""

    path: str
    size_bytes: int
    state: State
    fetch_bytes: int


def plan_fetch(place: LockedFolder, pins: Sequence[FilePin], options: Options) -> list[PlannedFile]:
    """Each file's state; raises what a fetch would raise before its first byte."""
    require_own_folder(place, pins)
    proved = proved_identities(place)
    planned: list[PlannedFile] = []
    seen: set[str] = set()  # two names of one content are one download
    for pin in pins:
        state: State
        if identity := right_size(place.file(pin), pin):
            # only reading tells whether its bytes are right: minutes for a large set
            state, missing = "right" if proved.get(pin.path) == identity else "to be read", 0
        else:
            fetched = PartialFile(pin, place.partial_folder, options.range_bytes).kept_bytes
            state, missing = "begun" if fetched else "missing", pin.size_bytes - fetched
        size, missing = pin.size_bytes, 0 if pin.want in seen else missing
        planned.append(
            PlannedFile(path=pin.path, size_bytes=size, state=state, fetch_bytes=missing)
        )
        seen.add(pin.want)
    require_space(place.root, sum(file.fetch_bytes for file in planned))
    return planned
