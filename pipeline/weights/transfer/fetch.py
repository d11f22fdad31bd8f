"""A locked set's files to their place: in parallel, resumable, hashed as they arrive."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.errors import DiskFull, SpecInvalid, StoreUnwritable
from pipeline.fetch.http import Client
from pipeline.files import is_free, locked, os_errors_explained
from pipeline.weights.disk.hashing import MACHINE_ERRORS, cores, on_all_cores, read_file
from pipeline.weights.disk.install import install, link
from pipeline.weights.disk.receipt import proved_identities
from pipeline.weights.disk.survey import right_size
from pipeline.weights.model import FilePin, read_lock
from pipeline.weights.place import Place
from pipeline.weights.transfer.partial_file import PartialFile
from pipeline.weights.transfer.router import Router
from pipeline.weights.transfer.routes import Route
from pipeline.weights.transfer.workers import Throttle, WorkerPool, read_range

# Large enough that asking costs nothing beside sending, small enough that eight connections share
# a shard of 5 GB (the usual size on the Hub) to its end.
RANGE_BYTES = 64 << 20
JOBS = 8  # what `hf download` uses, and what mirrors expect from one client
# a disk that is filled to its last byte makes other programs fail
LEAVE_FREE_BYTES = 64 << 20
_LIMITS = "Nothing was fetched. The machine is out of memory or of open files: see `ulimit -n`."


@dataclass(frozen=True)
class Options:
    """How many connections, how large the ranges, how fast at most."""

    jobs: int = JOBS
    range_bytes: int = RANGE_BYTES
    limit_bytes_per_s: float | None = None
    first_wait_s: float = 0.5


def fetch_files(
    place: Place,
    pins: Sequence[FilePin],
    routes: Sequence[Route],
    *,
    client: Client,
    options: Options | None = None,
    is_right: Callable[[FilePin], bool] | None = None,
) -> list[FilePin]:
    """Fetch every file that is not yet right; returns those that were fetched.

    Files that are there are right when a receipt proves them or their hash is right; `is_right`
    may answer instead. One process at a time works on a place.
    """
    lock_file = place.state / "fetch.lock"
    with os_errors_explained(lock_file):
        if lock_file.exists() and not is_free(lock_file):
            log.say("Another fetch is at work on this folder; waiting for it")
    with locked(lock_file, stop=client.stop):
        _require_own_folder(place, pins)
        todo = _not_right(place, pins, is_right, client.stop)
        if todo:
            _transfer(place, todo, Router(routes), client, options or Options())
        for pin in pins:
            link(place, pin)
        _drop_stale_partials(place)
    return todo


def fetch_range(
    routes: Sequence[Route],
    pin: FilePin,
    start: int,
    stop: int,
    *,
    client: Client,
    options: Options | None = None,
) -> Iterator[bytes]:
    """The bytes of one range, in order and complete; only the caller knows what they should be."""
    chosen = options or Options()
    throttle = Throttle(chosen.limit_bytes_per_s, client.stop)
    yield from read_range(Router(routes), pin, start, stop, client, throttle, chosen.first_wait_s)


def _require_own_folder(place: Place, pins: Sequence[FilePin]) -> None:
    """Refuse a folder of another set, and names that cannot be written."""
    if place.lock_file.exists():
        held = read_lock(place.lock_file)
        if (held.name, held.repository) != (place.lock.name, place.lock.repository):
            raise SpecInvalid(
                f"{place.root}: holds {held.name} of {held.repository}",
                "Choose another folder with --to: one folder, one set.",
            )
    for pin in pins:
        if place.file(pin).is_dir() and not place.file(pin).is_symlink():
            raise StoreUnwritable(f"{place.file(pin)}: is a folder")


def _not_right(
    place: Place,
    pins: Sequence[FilePin],
    is_right: Callable[[FilePin], bool] | None,
    stop: threading.Event,
) -> list[FilePin]:
    """Files that are missing, or that are there with other bytes."""
    identities = {pin.path: right_size(place.file(pin), pin) for pin in pins}
    here = [pin for pin in pins if identities[pin.path] is not None]
    if is_right is not None:
        right = {pin.path for pin in here if is_right(pin)}
    else:
        proved = proved_identities(place)
        right = {pin.path for pin in here if proved.get(pin.path) == identities[pin.path]}
        unknown = [pin for pin in here if pin.path not in right]
        right |= _right_by_hash(place, unknown, stop) if unknown else set()
    return [pin for pin in pins if pin.path not in right]


def _right_by_hash(place: Place, pins: list[FilePin], stop: threading.Event) -> set[str]:
    """Which of the files that are there have the right bytes; all cores read."""
    total = sum(pin.size_bytes for pin in pins)
    right: set[str] = set()

    def check(pin: FilePin) -> None:
        try:
            reading = read_file(place.file(pin), pin.new_hash(), advance=bar.advance, stop=stop)
        except OSError as error:  # a file that cannot be read is fetched, too
            if error.errno in MACHINE_ERRORS:
                raise StoreUnwritable(f"{place.file(pin)}: {error.strerror}", _LIMITS) from error
            return
        if reading.digest == pin.want:
            right.add(pin.path)

    title = f"Checking {len(pins)} files that are here, {log.size(total)}"
    with log.step(title), log.progress("check", total) as bar:
        on_all_cores(check, pins, cores(), stop.set)
    return right


def _transfer(
    place: Place, pins: Sequence[FilePin], router: Router, client: Client, options: Options
) -> None:
    names: dict[str, list[FilePin]] = {}  # two names of one content are one download
    for pin in pins:
        names.setdefault(pin.want, []).append(pin)
    folder = place.partial_folder
    partials = [PartialFile(same[0], folder, options.range_bytes) for same in names.values()]
    kept = sum(partial.kept_bytes for partial in partials)
    missing = sum(partial.pin.size_bytes for partial in partials) - kept
    _require_space(place.root, missing)

    def finish(partial: PartialFile) -> None:
        with os_errors_explained(partial.path):
            partial.sync()  # before it gets its name: a name must never lead to lost bytes
        install(place, partial.path, names[partial.pin.want])
        partial.forget()

    more = f" ({log.size(kept)} are here from an earlier run)" if kept else ""
    title = f"Fetching {len(partials)} files, {log.size(missing)}{more}"
    throttle = Throttle(options.limit_bytes_per_s, client.stop)
    with log.step(title), log.progress("weights", missing) as bar:
        pool = WorkerPool(
            partials,
            router,
            client,
            throttle,
            first_wait_s=options.first_wait_s,
            bar=bar,
            install=finish,
        )
        pool.run(options.jobs)


def _require_space(root: Path, missing_bytes: int) -> None:
    """Refuse before the first byte what the disk cannot hold."""
    nearest = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(nearest).free
    if missing_bytes + LEAVE_FREE_BYTES > free:
        raise DiskFull(
            f"{root}: {log.size(missing_bytes)} are to be fetched, {log.size(free)} are free",
            "Free some, or fetch to another disk; what is here already is kept and counted.",
        )


def _drop_stale_partials(place: Place) -> None:
    """Remove partial files that no file of today's lock can become."""
    wants = {pin.want for pin in place.lock.files}
    for path in place.partial_folder.glob("*"):
        if path.name.partition(".")[0] not in wants:
            path.unlink(missing_ok=True)
    with suppress(OSError):
        place.partial_folder.rmdir()
