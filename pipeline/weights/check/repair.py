"""Repair a damaged set: fetch only what is wrong, keep only what is proved.

The receipt's marks are what the hash of a file was after each block, so it is known of each block
whether the damaged file has it right, and whether a source does. A new file is put together beside
the damaged one, from its right blocks and fetched ones, and takes its place when its whole hash is
right. Until then the user has what there was before.

A set of 600 GB takes days to fetch. Before it fetches a file whole, a repair looks for the bytes
where they may well be: where a link in its place leads, in files of its size below the same folder,
and in the Hub cache of this user.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.core import log
from pipeline.core.errors import Interrupted, PipelineError
from pipeline.core.files import free_bytes, locked, on_all_cores
from pipeline.core.model import Frozen
from pipeline.core.net.http import NetClient
from pipeline.weights.check.verify import Checked, WeightsVerifyOptions, verify_files
from pipeline.weights.disk.hashing import BLOCK_BYTES, hash_file, mark_of
from pipeline.weights.disk.install import clear_name, make_way, repair_link, set_aside
from pipeline.weights.disk.receipt import read_receipt
from pipeline.weights.disk.survey import plain_size, right_size, shown_name, some, walk_folder
from pipeline.weights.model import FILE_HASH, FilePin
from pipeline.weights.place import LockedFolder, cache_name, user_cache
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.router import ByteStream, Route
from pipeline.weights.transfer.sources import open_local
from pipeline.weights.transfer.workers import Span, merged, missing, write_at

_JOBS = 4  # files at a time: enough for a disk and a source to be busy together
_LARGE_SHARE = 0.5  # of a set: fetching more than this is worth a second thought
_MOST_BLOCKS = 8  # in one request: 32 MB, which are held in memory until they are judged


@dataclass
class RouteSupply:
    """Folders, neighbours and the Hub, as a fetch uses them."""

    routes: Sequence[Route]
    client: NetClient


@dataclass(eq=False)
class CopyRoute:
    """Files of this machine that have the bytes of others, by their hash."""

    copies: dict[str, Path]
    name: str = "this machine"
    is_shared: bool = False

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        paths = [self.copies[pin.want]] if pin.want in self.copies else []
        return open_local(paths, pin, start, stop, self.name)


class Repaired(Frozen):
    """What was done about one file."""

    path: str
    how: str
    fetched_bytes: int = 0
    error: str = ""


def repair_damage(
    place: LockedFolder, checked: Checked, supply: RouteSupply, *, dry_run: bool = False
) -> list[Repaired]:
    """Repair the damage that a verify reported; name files that cannot be, and go on.

    A dry run only reports what would be fetched.
    """
    place.require_own_state()
    with locked(place.state / "repair.lock"):
        damage, readings = checked.report.damage, checked.readings
        wrong = {f.path for f in damage if f.kind not in ("extra", "name")}
        done: list[Repaired] = []
        extras = [f for f in damage if f.kind == "extra"]
        if extras and dry_run:
            log.say(f"  to be set aside: {some([f.path for f in extras])}")
        # before the search for copies, which may be among them
        for finding in () if dry_run else extras:
            aside = set_aside(place, place.snapshot / finding.name).relative_to(place.root)
            done.append(Repaired(path=finding.path, how=shown_name(f"set aside as {aside}")))
        pins = [pin for pin in place.lock.files if pin.path in wrong]
        receipt = read_receipt(place)
        # of a file that is there in part, the marks tell which blocks are right
        marks = {
            pin.path: entry.each_mark
            for pin in pins
            if (entry := receipt.get(pin.path)) and entry.want == pin.want and entry.marks
            if plain_size(place.file(pin)) is not None
        }
        # first what lies on this machine: it may spare days of fetching
        rest = (p for p in place.lock.files if p.path not in wrong or p.path in readings)
        judged = {place.file(pin) for pin in rest}
        copies = find_copies(place, [p for p in pins if p.path not in marks], judged)
        # two files may be swapped, so some wrong files hold what others want
        held = {readings[path].digest for path in wrong if path in readings}
        part = [p for p in pins if p.path in marks and p.want not in held]
        _report(place, pins, {*copies, *held}, part)
        if dry_run:
            return []
        todo = list({place.file(pin): pin for pin in part}.values())
        with log.progress("repaired", sum(pin.size_bytes for pin in todo)) as bar:
            patch = partial(_patch, place, marks, supply, bar.advance)
            patched = on_all_cores(patch, todo, supply.client.hang_up, _JOBS)
        done += [repaired for repaired in patched if repaired]
        rebuilt = {place.file(p) for p in pins if p.path in {r.path for r in done}}
        whole = [pin for pin in pins if place.file(pin) not in rebuilt]
        done += _fetched(place, whole, copies, held, supply)
        astray = wrong | {f.path for f in damage if f.kind == "name"}
        astray -= {r.path for r in done if r.error}  # no link to a blob that is still wrong
        links = [pin for pin in place.lock.files if pin.path in astray] if place.hub_cache else []
        for pin in links:
            if repair_link(place, pin):
                done.append(Repaired(path=pin.path, how="linked to its blob"))
    return sorted(done, key=lambda r: r.path)


def _report(place: LockedFolder, pins: list[FilePin], here: set[str], part: list[FilePin]) -> None:
    """Print how much there is to fetch."""
    blobs = {pin.want: pin for pin in pins}.values()
    local = [pin for pin in blobs if pin.want in here]
    whole = [pin for pin in blobs if pin not in local and pin not in part]
    of_all = place.lock.size_bytes
    for what, some_pins, more in (
        ("on this machine already, not fetched", local, ""),
        ("to be fetched only where they differ", [pin for pin in blobs if pin in part], ""),
        ("to be fetched whole", whole, f" (the set has {log.size(of_all)})"),
    ):
        if some_pins:
            names = f"{len(some_pins)} files" if len(some_pins) != 1 else some_pins[0].path
            size = log.size(sum(pin.size_bytes for pin in some_pins))
            log.say(f"  {what}: {names}, {size}{more}")
    if sum(pin.size_bytes for pin in whole) > of_all * _LARGE_SHARE:
        log.say(
            "  that is most of the set: if another folder has it, stop this with Ctrl-C"
            " and name that folder with --from"
        )


def repair_known(
    place: LockedFolder, pins: Collection[FilePin], supply: RouteSupply
) -> list[Repaired]:
    """Repair files that a receipt knows block by block, so that a fetch need not take them whole.

    Leaves the rest, including what it cannot repair, to the fetch.
    """
    receipt = read_receipt(place)
    entries = [(pin, receipt.get(pin.path)) for pin in pins]
    doubted = frozenset(
        pin.path
        for pin, entry in entries
        if entry is not None
        and (entry.want, bool(entry.marks)) == (pin.want, True)
        and plain_size(place.file(pin)) is not None
        and right_size(place.file(pin), pin) != entry.identity
    )
    if not doubted:
        return []
    checked = verify_files(place, WeightsVerifyOptions(paths=doubted))
    # the fetch renames one that holds another file's bytes
    wants = {pin.want for pin in pins}
    swapped = {path for path, reading in checked.readings.items() if reading.digest in wants}
    damage = [f for f in checked.report.damage if f.kind in ("changed", "short", "long")]
    wrong = [f for f in damage if f.path not in swapped]
    report = checked.report.model_copy(update={"findings": wrong})
    return repair_damage(place, Checked(report, checked.readings), supply) if wrong else []


def find_copies(
    place: LockedFolder, pins: Sequence[FilePin], judged: Collection[Path]
) -> dict[str, Path]:
    """Map wanted hashes to files that have them; skip `judged` files, which are known."""
    wanted = {pin.want for pin in pins}
    sizes = {pin.size_bytes for pin in pins} - {0}  # an empty file needs no copy
    by_size: dict[int, list[Path]] = {}
    # what is half fetched or half repaired is no copy
    unfinished = place.partial_folder.relative_to(place.root).as_posix()
    for path in (place.root / name for name in walk_folder(place.root, [unfinished])):
        # a blob's name is its hash, so one with another name need not be read
        is_blob = path.parent.name == "blobs" and FILE_HASH.fullmatch(path.name)
        if path in judged or (is_blob and path.name not in wanted):
            continue
        if (size := plain_size(path)) in sizes and size:
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
    stop = threading.Event()

    def check(item: tuple[Path, FilePin]) -> None:
        with suppress(OSError):
            by_digest[hash_file(item[0], item[1].new_hash(), stop=stop).digest] = item[0]

    on_all_cores(check, [(path, pin) for (path, _), pin in candidates.items()], stop.set)
    return {digest: path for digest, path in by_digest.items() if digest in wanted}


def _fetched(
    place: LockedFolder,
    pins: list[FilePin],
    copies: dict[str, Path],
    held: Collection[str],
    supply: RouteSupply,
) -> list[Repaired]:
    """Get whole files: from this machine, else from the sources."""
    before = {pin.path: right_size(place.file(pin), pin) for pin in pins}
    why = ""
    try:
        for pin in pins:
            make_way(place, place.file(pin))
            clear_name(place, pin)
        if pins:
            routes = [CopyRoute(copies), *supply.routes] if copies else supply.routes
            fetch_files(place, pins, routes, client=supply.client, begins=False)
    except Interrupted:
        raise
    except (PipelineError, OSError) as error:
        why = str(error)
    done = []
    for pin in pins:
        # a replaced file has another identity, and its name only because its hash is right
        is_old = right_size(place.file(pin), pin) in (None, before[pin.path])
        how, size = "fetched whole", pin.size_bytes
        if is_old and why:
            how, size = "not repaired", 0
        elif pin.want in copies:
            how, size = f"copied from {copies[pin.want]}", 0
        elif is_old or pin.want in held:
            how, size = "was here already", 0
        left = why if is_old else ""
        done.append(Repaired(path=pin.path, how=how, fetched_bytes=size, error=left))
    return done


def _patch(
    place: LockedFolder,
    known: dict[str, tuple[str, ...]],
    supply: RouteSupply,
    advance: Callable[[int], None],
    pin: FilePin,
) -> Repaired | None:
    """Join the right blocks of a damaged file with others from sources.

    None if that fails: the marks are of another file, or no source has bytes that fit.
    """
    size, hasher, target = pin.size_bytes, pin.new_hash(), place.file(pin)
    asked, held, marks = list[Span](), list[Span](), known[pin.path]
    if len(marks) != -(-size // BLOCK_BYTES) or free_bytes(place.root) < size:
        return None
    # two names of one content are two files, so the name is part of the partial file's
    name = hashlib.sha256(pin.path.encode()).hexdigest()[:16]
    path = place.partial_folder / f"{pin.want}.{name}.repair"
    path.parent.mkdir(parents=True, exist_ok=True)

    def fits(at: int, data: bytes) -> bool:
        """Whether these are the block's bytes; if so, add them to the hash."""
        nonlocal hasher
        # a wrong block must not enter the hash: other bytes for it are tried next
        ahead = hasher.copy()
        ahead.update(data)
        is_right = len(data) == min(BLOCK_BYTES, size - at)
        is_right = is_right and mark_of(ahead) == marks[at // BLOCK_BYTES]
        hasher = ahead if is_right else hasher
        return is_right

    try:
        with open_both(target, path, size) as (taken, made):
            at = bad_blocks = 0
            while at < size:
                stop = min(at + BLOCK_BYTES, size)
                if fits(at, _read_block(taken, at, stop)):
                    at, bad_blocks = stop, 0
                    continue
                if fits(at, _read_block(made, at, stop)):  # of a run that was killed
                    held.append((at, stop))
                    at = stop
                    continue
                # no more at once than was bad already: at most half of what comes was right
                stop = min(at + min(max(bad_blocks, 1), _MOST_BLOCKS) * BLOCK_BYTES, size)
                asked.append((at, stop))
                for route in supply.routes:
                    try:
                        got = fetch_range([route], pin, at, stop, client=supply.client)
                        data = b"".join(got)
                    except Interrupted:
                        raise
                    except PipelineError as error:  # the next source may have it
                        log.say(f"  {error}")
                        data = b""
                    while (block := data[:BLOCK_BYTES]) and fits(at, block):
                        write_at(made, block, at)
                        data, at, bad_blocks = data[BLOCK_BYTES:], at + len(block), bad_blocks + 1
                if at < stop:
                    path.unlink()
                    return None
            for start, stop in missing(merged([*asked, *held]), size):
                copy_range(taken, made, start, stop)
            os.fsync(made)
        if hash_file(path, pin.new_hash(), stop=supply.client.stop).digest != pin.want:
            path.unlink()
            return None
        make_way(place, target)
        os.replace(path, target)
    except OSError:  # the following fetch reports the reason
        return None
    advance(size)
    ranges = merged(asked)
    how = f"{log.count(len(ranges), 'range')} fetched"
    return Repaired(path=pin.path, how=how, fetched_bytes=sum(b - a for a, b in ranges))


def _read_block(handle: int, start: int, stop: int) -> bytes:
    try:
        return os.pread(handle, stop - start, start)
    except OSError:  # a bad sector costs its block, not the file
        return b""


@contextmanager
def open_both(taken: Path, made: Path, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Open a file to read, and one of that size to write, which keeps its contents.

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
    """Copy a range; disks that can, share the bytes instead."""
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
