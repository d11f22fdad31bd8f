"""The record of what was proved when; it makes verifying unchanged files instant.

An entry holds for one file on one disk of one machine: its size, times, inode and device. The
time of a file's last change (ctime) is set by the kernel and cannot be put back, so an edit shows
even where its mtime was put back. Whoever may write the folder may also write a receipt: it saves
time, it proves nothing to others, and `--full` does without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError

from pipeline.core import log
from pipeline.core.errors import DiskFull, StoreUnwritable, WeightsUnknown
from pipeline.core.files import change_file, on_all_cores, os_errors_explained, read_plain
from pipeline.core.model import FILE_VERSION, Digest, Frozen, canonical_json, sha256_of
from pipeline.core.sealed import Sealed
from pipeline.weights.disk.hashing import (
    BLOCK_BYTES,
    MACHINE_ERRORS,
    MARK_CHARS,
    FileReading,
    Identity,
    hash_file,
)
from pipeline.weights.disk.survey import FileFinding, extras, plain_size, right_size, survey
from pipeline.weights.model import FilePin, WeightsLock, sealed_weights_lock, weights_spec
from pipeline.weights.place import STATE, LockedFolder, in_hub_cache, require_no_links

# The coarsest clock of a file system in use (FAT's); Linux's own disks tick every few milliseconds.
CLOCK_TICK_NS = 2_000_000_000
_MOST_BYTES = 256 << 20  # a set of 1 TB has 4 MB of marks
# Writing a receipt, always whole, takes a second for 20,000 files: this many times as long passes
# until the next write, and a kill may cost the proof of what was proved meanwhile.
_PAUSE = 10
_MACHINE = Path("/etc/machine-id")
_LIMITS = "The machine is out of memory or of open files: see `ulimit -n`."


class ReceiptEntry(Frozen):
    """One file as it was proved. Without an identity only its marks are of use."""

    path: str
    want: str
    identity: Identity | None
    marks: Annotated[str, StringConstraints(pattern=rf"^([0-9a-f]{{{MARK_CHARS}}})*$")]

    @property
    def each_mark(self) -> tuple[str, ...]:
        """The hash after each block of the whole file."""
        return tuple(self.marks[i : i + MARK_CHARS] for i in range(0, len(self.marks), MARK_CHARS))


class Receipt(Sealed):
    """Everything proved about one locked set in one folder.

    The seal shows a damaged or half-written receipt; it is no defence against a forger.
    """

    format: Annotated[Literal[2], FILE_VERSION] = 2
    lock: Digest
    machine: str
    block_bytes: int = BLOCK_BYTES
    files: list[ReceiptEntry] = Field(default=[])
    seal: str = ""


def machine() -> str:
    """This machine, so that a folder on a moved or cloned disk is read again; "" where unknown."""
    try:
        # hashed with a word of our own, as machine-id(5) asks of programs that publish the id
        return sha256_of(b"sm120 receipt " + _MACHINE.read_bytes().strip())
    except OSError:
        return ""


def read_receipt(place: LockedFolder) -> dict[str, ReceiptEntry]:
    """Read entries by path, each for its hash; none if the receipt is damaged or foreign."""
    try:
        return _entries(read_plain(place.receipt_file, _MOST_BYTES) or b"")
    except OSError:
        return {}


def _entries(data: bytes) -> dict[str, ReceiptEntry]:
    try:
        receipt = Receipt.model_validate_json(data)
    except ValidationError:
        return {}
    # Inode numbers of another machine's disk mean nothing here. One for another lock is of use:
    # most files of a set stay the same when it is locked anew, and need not be read for that.
    is_own = (receipt.machine, receipt.block_bytes) == (machine(), BLOCK_BYTES)
    is_whole = receipt.seal == receipt.computed_seal()
    return {entry.path: entry for entry in receipt.files} if is_own and is_whole else {}


def disk_time_ns(place: LockedFolder) -> int | None:
    """The time by the clock that stamps the files; None if nothing can be written."""
    try:
        place.require_own_state()
    except StoreUnwritable:
        return None
    return state_time_ns(place.state)


def state_time_ns(state: Path) -> int | None:
    """As `disk_time_ns`, for a place that has no lock yet."""
    try:
        # a network disk stamps files by its server's clock, which may differ from ours by minutes
        state.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=state) as probe:
            return os.fstat(probe.fileno()).st_mtime_ns
    except OSError:
        return None


def proved(pin: FilePin, reading: FileReading, since_ns: int) -> ReceiptEntry:
    """The entry of a file whose hash was right; reading began after `since_ns`.

    A file changed in the same tick of the clock could change once more without a trace ("racily
    clean", as git calls it): it keeps no identity, and is read again next time.
    """
    is_settled = reading.identity.ctime_ns < since_ns - CLOCK_TICK_NS
    identity = reading.identity if is_settled else None
    marks = "".join(reading.marks)
    return ReceiptEntry(path=pin.path, want=pin.want, identity=identity, marks=marks)


class ReceiptWriter:
    """Writes a receipt along with the proofs, so that a kill costs only the last ones."""

    def __init__(self, place: LockedFolder) -> None:
        self._place = place
        self._new: list[ReceiptEntry] = []
        self._next_s = 0.0
        self._guard = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        # even after a Ctrl-C: no need to read again what was read or fetched before it
        self.add(at_once=True)

    def add(self, entries: Iterable[ReceiptEntry] = (), *, at_once: bool = False) -> None:
        """Write the entries, unless writing receipts would take most of the time."""
        with self._guard:
            self._new += entries
            begun_s = time.monotonic()
            if self._new and (at_once or begun_s >= self._next_s):
                keep_receipt(self._place, self._new, ())
                self._new = []
                now_s = time.monotonic()
                self._next_s = now_s + _PAUSE * (now_s - begun_s)


def keep_receipt(
    place: LockedFolder, entries: Iterable[ReceiptEntry], doubted: Iterable[str]
) -> None:
    """Add what was proved, and stop vouching for doubted files; the marks stay.

    Rot on a disk changes no time and no inode: a file that is bad must not pass by its old entry.
    A receipt only saves time: failing to write one is reported, and not an error.
    """

    def change(data: bytes) -> bytes:
        known = _entries(data)
        for path in known.keys() & set(doubted):
            # the marks stay: they tell a repair which blocks are still good
            known[path] = known[path].model_copy(update={"identity": None})
        known.update({entry.path: entry for entry in entries})
        paths = {pin.path for pin in place.lock.files}
        # files that the lock no longer has would otherwise be kept for ever
        files = [known[path] for path in sorted(known) if path in paths]
        done = Receipt(lock=place.lock.seal, machine=machine(), files=files).sealed()
        text = json.dumps(done.model_dump(), sort_keys=True, ensure_ascii=False)
        return text.encode() + b"\n"

    try:
        place.require_own_state()
        if disk_time_ns(place) is not None:
            change_file(place.receipt_file, place.state / "receipt.lock", _MOST_BYTES, change)
    except (DiskFull, StoreUnwritable) as error:
        log.say(f"  no receipt is kept: {error}")


@dataclass(frozen=True)
class ReceiptCheck:
    """What a receipt, sizes and kinds tell about a set, without reading a byte."""

    proved: list[FilePin]
    unknown: list[FilePin]
    findings: list[FileFinding]


def proved_identities(place: LockedFolder) -> dict[str, Identity]:
    """The identity of each proved file; empty without a good receipt."""
    known, wanted = read_receipt(place), {pin.path: pin.want for pin in place.lock.files}
    return {
        path: entry.identity
        for path, entry in known.items()
        if entry.identity is not None and entry.want == wanted.get(path)
    }


def check_by_receipt(
    place: LockedFolder, neighbours: Collection[LockedFolder] = ()
) -> ReceiptCheck:
    """Find the files that still match their receipt; neighbours share the snapshot."""
    known = proved_identities(place)
    present, findings = survey(place, place.lock.files)
    findings += extras(place, neighbours)
    # a name that leads elsewhere is damage though the blob itself is proved
    odd = {finding.path for finding in findings if finding.damage}
    good = [p.pin for p in present if known.get(p.pin.path) == p.identity and p.pin.path not in odd]
    named = {pin.path for pin in good} | odd
    unknown = [pin for pin in place.lock.files if pin.path not in named]
    return ReceiptCheck(good, unknown, findings)


def files_here(
    place: LockedFolder, pins: Sequence[FilePin], stop: threading.Event
) -> tuple[set[str], dict[str, FilePin]]:
    """Return the paths of right files, and map hashes to the others that are there.

    Trusts the receipt, or else hashes the files now and adds them to it.
    """
    known = proved_identities(place)
    by_size = {pin.size_bytes: pin for pin in pins}
    right, unread = set(), []  # pairs: the file at the first's path is hashed as the second is
    for pin in pins:
        if (identity := right_size(place.file(pin), pin)) is None:
            # one of a wrong size may be another file of the set
            size = plain_size(place.file(pin))
            if size and (other := by_size.get(size)):
                unread.append((pin, other))
        elif known.get(pin.path) == identity:
            right.add(pin.path)
        else:
            unread.append((pin, pin))
    digests: dict[str, str] = {}
    since_ns = disk_time_ns(place) if unread else None

    def check(file: tuple[FilePin, FilePin]) -> None:
        pin, like = file
        try:
            reading = hash_file(place.file(pin), like.new_hash(), advance=bar.advance, stop=stop)
        except OSError as error:
            if error.errno in MACHINE_ERRORS:
                raise StoreUnwritable(f"{place.file(pin)}: {error.strerror}", _LIMITS) from error
            return
        digests[pin.path] = reading.digest
        if reading.digest == pin.want and since_ns is not None:
            writer.add([proved(pin, reading, since_ns)])

    if unread:
        total = sum(like.size_bytes for _, like in unread)
        title = f"Checking {log.count(len(unread), 'file')} already here, {log.size(total)}"
        with log.step(title), log.progress("check", total) as bar, ReceiptWriter(place) as writer:
            on_all_cores(check, unread, stop.set)
    right |= {pin.path for pin, _ in unread if digests.get(pin.path) == pin.want}
    wrong = {digests[p.path]: p for p, _ in unread if p.path in digests and p.path not in right}
    return right, wrong


# The organisation of such a lock: no repository of the Hub has it.
LOCAL = "local"
# What clients of the Hub and git keep beside the files.
_NOT_WEIGHTS = (STATE, ".cache", ".git")


def is_own(lock: WeightsLock) -> bool:
    """Whether a lock is for a folder, not for a repository."""
    return lock.repository.startswith(f"{LOCAL}/")


def lock_folder(folder: Path) -> WeightsLock:
    """Hash every file of a folder, and leave the lock and a receipt in it.

    The content decides the commit: the same files give the same lock.
    """
    folder = folder.resolve()
    if in_hub_cache(folder):
        raise WeightsUnknown(
            f"{folder}: is a part of a Hub cache, whose files have a repository",
            "Lock that repository: `sm120 weights lock ORG/MODEL@COMMIT`.",
        )
    require_no_links(folder / STATE)
    stop = threading.Event()
    with os_errors_explained(folder):
        paths = _files(folder)
        since_ns = state_time_ns(folder / STATE)  # before the first file is read
        sizes = {path: (folder / path).stat().st_size for path in paths}
        total, order = sum(sizes.values()), sorted(paths, key=lambda path: -sizes[path])
        what = f"Hashing {log.count(len(paths), 'file')}, {log.size(total)}"
        with log.step(what), log.progress("hashed", total) as bar:
            read = on_all_cores(
                lambda path: hash_file(
                    folder / path, hashlib.sha256(), advance=bar.advance, stop=stop
                ),
                order,
                stop.set,
            )
    readings = dict(zip(order, read, strict=True))
    pins = [
        FilePin(path=path, size_bytes=reading.identity.size_bytes, sha256=reading.digest)
        for path, reading in readings.items()
    ]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", folder.name).strip(".-") or "weights"
    content = canonical_json([pin.model_dump() for pin in sorted(pins, key=lambda p: p.path)])
    commit = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    lock = sealed_weights_lock(weights_spec(f"{LOCAL}/{name[:90]}"), commit, pins)
    place = LockedFolder(folder, lock)
    with os_errors_explained(folder):
        place.keep_lock()
    if since_ns is not None:
        entries = [proved(pin, readings[pin.path], since_ns) for pin in lock.files]
        keep_receipt(place, entries, ())
    return lock


def _files(folder: Path) -> list[str]:
    """List a folder's files; refuse a link, as its bytes are somewhere else."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _NOT_WEIGHTS)
        for name in (*folders, *names):
            path = Path(root, name)
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise WeightsUnknown(
                    f"{path}: is not a plain file",
                    "A lock is of files alone: copy what the link leads to into the folder.",
                )
        found += [Path(root, name).relative_to(folder).as_posix() for name in sorted(names)]
    if not found:
        raise WeightsUnknown(f"{folder}: has no files", "Name the folder of the weights.")
    for name in found:
        try:
            FilePin(path=name, size_bytes=0, sha256="0" * 64)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise WeightsUnknown(f"{folder / name}: {reason}", "Rename the file.") from error
    return found
