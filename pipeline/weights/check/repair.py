"""Repairing a damaged set: only what is wrong is fetched, only what is proved is kept.

A new file is put together beside the damaged one, from its good blocks and fetched ranges, and
takes its place when its whole hash is right. Until then the user has what there was before.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from pipeline.core import log
from pipeline.core.errors import DiskFull, Interrupted, PipelineError, SourceUnreachable
from pipeline.core.files import free_bytes, locked
from pipeline.core.model import Frozen
from pipeline.weights.check.copies import NewFile, RouteSupply, find_copies
from pipeline.weights.check.verify import Checked, VerifyOptions, verify
from pipeline.weights.disk.hashing import Reading, identity_of, on_all_cores
from pipeline.weights.disk.install import make_way, repair_link, set_aside
from pipeline.weights.disk.receipt import read_receipt
from pipeline.weights.disk.survey import plain_size, right_size, shown, some
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place

_JOBS = 4  # files at a time: enough for a disk and a source to be busy together
_LARGE_SHARE = 0.5  # of a set: more than this is worth a second thought before it is fetched


class Repaired(Frozen):
    """What was done about one file."""

    path: str
    how: str
    fetched_bytes: int = 0
    error: str = ""


def repair(
    place: Place, checked: Checked, supply: RouteSupply, *, dry_run: bool = False
) -> list[Repaired]:
    """Repair the damage that a verify reported; a file that cannot be is named, others go on.

    A dry run only reports what would be fetched.
    """
    place.require_own_state()
    with locked(place.state / "repair.lock"):
        damage = checked.report.damage
        wrong = {f.path: f.kind for f in damage if f.kind not in ("extra", "name")}
        pins = [pin for pin in place.lock.files if pin.path in wrong]
        done: list[Repaired] = []
        extras = [f for f in damage if f.kind == "extra"]
        if extras and dry_run:
            log.say(f"  to be set aside: {some([f.path for f in extras])}")
        # before copies are looked for, which may be found among them
        for finding in () if dry_run else extras:
            aside = set_aside(place, place.snapshot / finding.name).relative_to(place.root)
            done.append(Repaired(path=finding.path, how=shown(f"set aside as {aside}")))
        # first what lies on this machine: it may spare days of fetching
        repairer = _Repairer(place, checked.readings, supply)
        repairer.look_around(pins)
        if dry_run:
            return []
        # missing files come by a fetch, which is faster than source by source
        gone = [pin for pin in pins if wrong[pin.path] == "missing" and not repairer.has(pin)]
        done += _fetched(place, gone, supply)
        done += repairer.repair([pin for pin in pins if pin.path not in {r.path for r in done}])
        astray = wrong.keys() | {f.path for f in damage if f.kind == "name"}
        astray -= {r.path for r in done if r.error}  # no link to a blob that is still wrong
        links = [pin for pin in place.lock.files if pin.path in astray] if place.hub_cache else []
        for pin in links:
            if repair_link(place, pin):
                done.append(Repaired(path=pin.path, how="linked to its blob"))
    return sorted(done, key=lambda r: r.path)


def repair_known(place: Place, pins: Collection[FilePin], supply: RouteSupply) -> list[Repaired]:
    """Repair files that a receipt knows block by block, so that a fetch need not take them whole.

    All else, also what cannot be repaired, is left to the fetch.
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
    checked = verify(place, VerifyOptions(paths=doubted))
    # one that holds another file's bytes is what the fetch moves to its name
    wants = {pin.want for pin in pins}
    swapped = {path for path, reading in checked.readings.items() if reading.digest in wants}
    damage = [f for f in checked.report.damage if f.kind in ("changed", "short", "long")]
    wrong = [f for f in damage if f.path not in swapped]
    report = checked.report.model_copy(update={"findings": wrong})
    return repair(place, Checked(report, checked.readings), supply) if wrong else []


def _fetched(place: Place, pins: list[FilePin], supply: RouteSupply) -> list[Repaired]:
    """Missing files, by a fetch; what that cannot bring is tried source by source afterwards."""
    try:
        for pin in pins:
            make_way(place, place.file(pin))
        if pins:
            supply.fetch(place, pins)
    except Interrupted:
        raise
    except PipelineError as error:
        log.say(f"  {error}")
    return [
        Repaired(path=pin.path, how="fetched whole", fetched_bytes=pin.size_bytes)
        for pin in pins
        if right_size(place.file(pin), pin)
    ]


class _Repairer:
    """Decides for each wrong file where its bytes come from, and puts it in its place."""

    def __init__(self, place: Place, readings: dict[str, Reading], supply: RouteSupply) -> None:
        self._place, self._readings, self._supply = place, readings, supply
        self._known = read_receipt(place)
        self._held: set[str] = set()  # hashes of what the wrong files hold: two may be swapped
        self._copies: dict[str, Path] = {}  # by hash: on this machine under another name
        self._here: set[str] = set()  # paths whose bytes lie in their partial file, proved
        self._stop = threading.Event()

    def look_around(self, pins: list[FilePin]) -> None:
        """Find what need not be fetched, and report how much is to be fetched."""
        wrong, place, read = {pin.path for pin in pins}, self._place, self._readings
        rest = (pin for pin in place.lock.files if pin.path not in wrong or pin.path in read)
        judged = {place.file(pin) for pin in rest}
        self._held = {read[path].digest for path in wrong if path in read}
        unpatched = [pin for pin in pins if not self._can_patch(pin)]
        self._copies = find_copies(place, unpatched, judged, self._stop)
        blobs = {pin.want: pin for pin in pins}.values()
        local = [pin for pin in blobs if self.has(pin)]
        part = [pin for pin in blobs if pin not in local and self._can_patch(pin)]
        whole = [pin for pin in blobs if pin not in local and pin not in part]
        if local:
            log.say(f"  on this machine already, not fetched: {_counted(local)}")
        if part:
            log.say(f"  to be fetched only where they differ: {_counted(part)}")
        if whole:
            of_all = place.lock.size_bytes
            log.say(f"  to be fetched whole: {_counted(whole)} (the set has {log.size(of_all)})")
            if sum(pin.size_bytes for pin in whole) > of_all * _LARGE_SHARE:
                log.say(
                    "  that is most of the set: if another folder has it, stop this with Ctrl-C"
                    " and name that folder with --from"
                )

    def has(self, pin: FilePin) -> bool:
        """Whether its bytes lie on this machine, so that nothing need be fetched for it."""
        return pin.want in self._copies or pin.want in self._held

    def _can_patch(self, pin: FilePin) -> bool:
        """Whether a part of the file exists, and its marks tell which blocks are right."""
        return bool(self._marks(pin)) and plain_size(self._place.file(pin)) is not None

    def _marks(self, pin: FilePin) -> tuple[str, ...]:
        """The hash after each block when the file was right; none where unknown."""
        entry = self._known.get(pin.path)
        return entry.each_mark() if entry and entry.want == pin.want else ()

    def repair(self, pins: list[FilePin]) -> list[Repaired]:
        """All of them, a few in parallel; each blob once."""
        once = {self._place.file(pin): pin for pin in pins}
        held = [(path, self._readings.get(pin.path)) for path, pin in once.items()]
        by_digest = {reading.digest: (path, reading) for path, reading in held if reading}
        for path, pin in once.items():
            partial = self._new_file(pin).path
            partial.parent.mkdir(parents=True, exist_ok=True)
            # its bytes may lie under the name of another: two files that were swapped
            other, reading = by_digest.get(pin.want, (path, None))
            with suppress(OSError):  # it is gone, or the disk has no hard links (exFAT)
                if reading and other != path and identity_of(os.lstat(other)) == reading.identity:
                    partial.unlink(missing_ok=True)
                    os.link(other, partial, follow_symlinks=False)

        def prove(pin: FilePin) -> None:
            """Its bytes may be here whole: from a run that was killed, or as another file."""
            if self._new_file(pin).is_right():
                self._here.add(pin.path)

        def halt() -> None:
            self._stop.set()
            self._supply.hang_up()

        todo, done = list(once.values()), list[Repaired]()
        # all are proved before any is moved: moving one of two swapped files changes the link
        # count, and so the identity, of the bytes that the other is being read from
        on_all_cores(prove, todo, _JOBS, halt)
        with log.progress("repaired", sum(pin.size_bytes for pin in todo)) as bar:

            def repair_one(pin: FilePin) -> None:
                try:
                    done.append(self._rebuild(pin))
                except (PipelineError, OSError) as error:
                    reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
                    done.append(Repaired(path=pin.path, how="not repaired", error=reason))
                bar.advance(pin.size_bytes)

            on_all_cores(repair_one, todo, _JOBS, halt)
        return done

    def _new_file(self, pin: FilePin) -> NewFile:
        # two names of one content are two files, so the name is part of the partial file's
        name = hashlib.sha256(pin.path.encode()).hexdigest()[:16]
        path = self._place.partial_folder / f"{pin.want}.{name}.repair"
        return NewFile(pin, path, self._stop)

    def _rebuild(self, pin: FilePin) -> Repaired:
        new = self._new_file(pin)
        if pin.path in self._here:
            return self._install(new, "was here already", 0)
        free = free_bytes(self._place.root)
        if free < pin.size_bytes:
            raise DiskFull(
                f"{pin.path}: needs {log.size(pin.size_bytes)}, {log.size(free)} are free",
                "A file is put together beside the damaged one, so that nothing is lost.",
            )
        if copy := self._copies.get(pin.want):
            new.copy(copy, pin.size_bytes)
            if new.is_right():
                return self._install(new, f"copied from {copy}", 0)
        last: PipelineError = SourceUnreachable(f"{pin.path}: there is no source to fetch it from")
        for source in self._supply.sources():
            try:
                asked = new.patch(self._place.file(pin), self._marks(pin), source)
                if asked is not None and new.is_right():
                    fetched = sum(stop - start for start, stop in asked)
                    return self._install(new, f"{log.count(len(asked), 'range')} fetched", fetched)
                if asked is not None:
                    new.path.unlink(missing_ok=True)
                return self._install(new, "fetched whole", new.fetch_whole(source))
            except (Interrupted, DiskFull):
                raise
            except PipelineError as error:
                last = error
        raise last

    def _install(self, new: NewFile, how: str, fetched: int) -> Repaired:
        target = self._place.file(new.pin)
        make_way(self._place, target)  # only now: until here the damaged file stayed in place
        os.replace(new.path, target)
        return Repaired(path=new.pin.path, how=how, fetched_bytes=fetched)


def _counted(pins: list[FilePin]) -> str:
    files = f"{len(pins)} files" if len(pins) != 1 else pins[0].path
    return f"{files}, {log.size(sum(pin.size_bytes for pin in pins))}"
