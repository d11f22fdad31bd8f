"""Check a folder against its lock: offline, on all cores, naming every file that differs."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from pipeline.core import log
from pipeline.core.errors import LocksDisagree, LockStale
from pipeline.core.files import cores, on_all_cores
from pipeline.core.model import Frozen
from pipeline.images.spec.checkout import Checkout
from pipeline.weights.disk import hashing, receipt
from pipeline.weights.disk.hashing import FileReading, hash_file
from pipeline.weights.disk.survey import FileFinding, Kind, Present, extras, some, survey
from pipeline.weights.model import (
    FilePin,
    WeightsLock,
    chosen_files,
    is_chosen,
    lock_path,
    read_weights_lock,
)
from pipeline.weights.place import LockedFolder


@dataclass(frozen=True)
class WeightsVerifyOptions:
    """How to verify."""

    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    paths: frozenset[str] | None = None  # exactly these, if given
    full: bool = False  # use no receipt
    direct: bool = False  # read from the disk, not from the page cache
    jobs: int = field(default_factory=cores)

    def chosen(self, lock: WeightsLock) -> list[FilePin]:
        """The files to look at."""
        if self.paths is not None:
            return [pin for pin in lock.files if pin.path in self.paths]
        return chosen_files(lock, self.only, self.exclude)


class VerifyReport(Frozen):
    """The result of verifying one place."""

    name: str
    commit: str
    lock: str
    root: str
    files: int
    size_bytes: int
    files_read: int
    bytes_read: int
    by_receipt: int
    seconds: float
    findings: list[FileFinding]

    @property
    def damage(self) -> list[FileFinding]:
        return [finding for finding in self.findings if finding.damage]

    @property
    def is_whole(self) -> bool:
        return not self.damage


@dataclass(frozen=True)
class Checked:
    """A report and, for a repair, the readings of the files."""

    report: VerifyReport
    readings: dict[str, FileReading]


def verify_files(
    place: LockedFolder, request: WeightsVerifyOptions, neighbours: Collection[LockedFolder] = ()
) -> Checked:
    """Check every chosen file; read those that no receipt proves."""
    start = time.monotonic()
    pins = request.chosen(place.lock)
    since_ns = receipt.disk_time_ns(place)  # before looking at the first file
    present, findings = survey(place, pins)
    # with --only or --exclude, nobody asked about the folder's other files
    others = extras(place, neighbours)
    findings += [f for f in others if is_chosen(f.path, request.only, request.exclude)]
    for finding in [f for f in findings if f.damage]:
        log.say(f"  {finding.kind}: {finding.path} {finding.detail}".rstrip())
    known = {} if request.full else receipt.proved_identities(place)
    todo = [p for p in present if known.get(p.pin.path) != p.identity]
    reader = _FileReader(request)
    try:
        reader.read(todo)
    finally:  # a Ctrl-C does not cost the proofs before it
        findings += reader.findings
        bad = {finding.path for finding in findings if finding.damage} - reader.unjudged
        if since_ns is not None and (todo or bad & known.keys()):
            good = [receipt.proved(pin, r, since_ns) for pin, r in reader.proved]
            receipt.keep_receipt(place, good, bad)
    report = VerifyReport(
        name=place.lock.name,
        commit=place.lock.commit,
        lock=place.lock.seal,
        root=str(place.root),
        files=len(pins),
        size_bytes=sum(pin.size_bytes for pin in pins),
        files_read=len(todo),
        bytes_read=sum(p.pin.size_bytes for p in todo),
        by_receipt=len(present) - len(todo),
        seconds=round(time.monotonic() - start, 3),
        findings=sorted(findings, key=lambda f: (f.path, f.kind)),
    )
    return Checked(report, reader.readings)


class _FileReader:
    """Reads files on all cores and sorts them into proved and not."""

    def __init__(self, request: WeightsVerifyOptions) -> None:
        self._request = request
        self._stop = threading.Event()
        self.proved: list[tuple[FilePin, FileReading]] = []
        self.readings: dict[str, FileReading] = {}
        self.findings: list[FileFinding] = []
        self.unjudged: set[str] = set()  # the machine failed, not the file: an old proof stays

    def read(self, todo: list[Present]) -> None:
        """Read the largest first, so that no core is left alone with a big one."""
        blobs: dict[Path, list[Present]] = {}
        for item in todo:  # in the Hub's layout equal files are one blob
            blobs.setdefault(item.path, []).append(item)
        order = sorted(blobs.values(), key=lambda items: -items[0].pin.size_bytes)
        with log.progress("verified", sum(items[0].pin.size_bytes for items in order)) as bar:
            judge = partial(self._judge, bar.advance)
            on_all_cores(judge, order, self._stop.set, self._request.jobs)

    def _judge(self, advance: hashing.Advance, items: list[Present]) -> None:
        path, pin, stop = items[0].path, items[0].pin, self._stop
        try:
            reading = hash_file(
                path, pin.new_hash(), advance=advance, stop=stop, direct=self._request.direct
            )
            if reading.identity != items[0].identity:
                raise hashing.Moved("changed before it was read")
        except (hashing.Moved, hashing.NotPlain) as error:
            return self._note(items, "moved", f"{error}: not proved")
        except OSError as error:
            if error.errno in hashing.MACHINE_ERRORS:
                self.unjudged |= {item.pin.path for item in items}
            return self._note(items, "unreadable", error.strerror or str(error))
        for item in items:
            self.readings[item.pin.path] = reading
            if reading.digest == item.pin.want:
                self.proved.append((item.pin, reading))
            else:
                self._note([item], "changed", f"locked as {item.pin.want}, is {reading.digest}")

    def _note(self, items: list[Present], kind: Kind, detail: str) -> None:
        self.findings += [FileFinding(path=i.pin.path, kind=kind, detail=detail) for i in items]


class Backing(Frozen):
    """Where the lock of a judgement came from, and who vouches for it."""

    lock_from: Literal["beside", "checkout", "given"] = "beside"
    vouched_by: str = ""
    recorded_by: str = ""  # who signed a record of an earlier judgement by this lock

    def sentence(self) -> str:
        """For people."""
        if self.lock_from == "given":
            return "judged by the lock that --lock names"
        if self.lock_from == "checkout":
            return "judged by the checkout's lock"
        if self.vouched_by:
            return f"judged by the lock beside the files, vouched for by {self.vouched_by}"
        sentence = "judged by the lock beside the files, which nothing vouches for"
        if self.recorded_by:
            return f"{sentence}; it is the one of the record that {self.recorded_by} signed"
        return sentence


def checkout_backing(place: LockedFolder, checkout: Checkout | None) -> Backing:
    """Compare the lock beside the files with the checkout's; raises where they disagree."""
    if checkout is None:
        return Backing()
    # a cache that the Hub's own client made has no lock beside it
    if not place.lock_file.is_file():
        return Backing(lock_from="checkout", vouched_by="the checkout")
    own, lock = lock_path(checkout, place.lock.name), place.lock
    for path in sorted(own.parent.glob("*.lock.yaml")):
        # a forged lock may have another name, so all locks of its commit are compared
        if path != own and lock.commit in path.read_text(encoding="utf-8", errors="replace"):
            _require_no_contradiction(place, path, read_weights_lock(path))
    if not own.is_file():
        return Backing()
    known = read_weights_lock(own)
    _require_no_contradiction(place, own, known)
    difference = ""
    if (lock.repository, lock.commit) != (known.repository, known.commit):
        difference = f"{lock.repository} at {lock.commit}, {known.repository} at {known.commit}"
    elif lock.files != known.files:
        apart = {pin.path for pin in lock.files} ^ {pin.path for pin in known.files}
        difference = f"only one of them has {some(sorted(apart))}"
    if difference:
        raise LockStale(
            f"{place.lock_file} and the checkout's {own.name} are of different sets: {difference}",
            f"`sm120 weights fetch {known.name}` brings the checkout's set; `--lock FILE` chooses"
            " which of the two locks judges.",
        )
    return Backing(vouched_by="the checkout")


def _require_no_contradiction(place: LockedFolder, path: Path, known: WeightsLock) -> None:
    """One commit has one content: two locks of it that differ cannot both be right."""
    lock, pins = place.lock, {pin.path: pin for pin in known.files}
    if (lock.repository, lock.commit) != (known.repository, known.commit):
        return
    # files that only one of them has are no contradiction: two specs may choose differently
    if differing := [pin.path for pin in lock.files if pins.get(pin.path, pin) != pin]:
        raise LocksDisagree(
            f"{place.lock_file} contradicts the checkout's {path.name} about {some(differing)}",
            f"One of them was changed, so nothing was judged. `--lock {path}` takes the latter.",
        )
