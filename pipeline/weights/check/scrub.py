"""Reading everything again every N days, a slice each night, so that disk rot shows early.

Rot changes no time stamp: only reading shows it, and only from the disk, not from the page cache.
A slice is the files with the oldest reads. The times of reads are stored next to the files, so
nights may be missed, files added and disks moved. Under systemd also set `IOSchedulingClass=idle`.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from pipeline.core.files import locked, read_plain, write_bytes
from pipeline.core.model import Frozen, canonical_json
from pipeline.weights.check.verify import WeightsVerifyOptions, verify_files
from pipeline.weights.disk.hashing import Identity
from pipeline.weights.disk.survey import FileFinding, Present, survey
from pipeline.weights.place import LockedFolder

DAY_S = 86_400
CATCH_UP_NIGHTS = 7  # after a holiday, a week's reading in one night at the most
# ioprio_set(2) has no wrapper in libc or Python: its number, and the class "idle"
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE_CLASS = 3 << 13
_MOST_BYTES = 64 << 20  # of scrub.json; 20,000 files take some 5 MB


class FileHistory(Frozen):
    """What is known of one file: when it was first seen, last read well, or why it is bad."""

    want: str
    seen_s: int
    read_s: int | None = None
    bad: FileFinding | None = None
    bad_as: Identity | None = None  # the bad file: not read again until it changes


class ScrubState(Frozen):
    """`scrub.json`: the scrub's position."""

    format: int = 1
    last_run_s: int | None = None
    credit_bytes: int = 0  # what may still be read; negative after a file larger than a slice
    files: dict[str, FileHistory] = {}


class ScrubSlice(Frozen):
    """One night's work on one place."""

    name: str
    root: str
    read: list[str]
    bytes_read: int
    overdue: list[str]  # not read within the days that were asked for
    oldest_days: float
    findings: list[FileFinding]


@dataclass(frozen=True)
class ScrubPace:
    """How fast to read the whole set."""

    every_days: int
    budget_bytes: int | None = None


def read_slice(
    place: LockedFolder, pace: ScrubPace, now_s: int, neighbours: Collection[LockedFolder] = ()
) -> ScrubSlice:
    """Read tonight's slice; keep reporting a known bad file until it is right."""
    place.require_own_state()
    with locked(place.state / "scrub.lock"):
        present, odd = survey(place, place.lock.files)
        state = ScrubState()
        # a damaged position is begun anew, which only reads more
        with suppress(OSError, ValidationError):
            data = read_plain(place.state / "scrub.json", _MOST_BYTES)
            state = ScrubState.model_validate_json(data or b"")
        histories: dict[str, FileHistory] = {}  # of every file as it is locked now, and no other
        for pin in place.lock.files:
            history = state.files.get(pin.path)
            if history is None or history.want != pin.want or history.seen_s > now_s:
                history = FileHistory(want=pin.want, seen_s=now_s)
            elif (history.read_s or 0) > now_s:  # the clock was put back
                history = history.model_copy(update={"read_s": None})
            histories[pin.path] = history
        # a slice for every night since the last run, within a limit
        nightly = math.ceil(place.lock.size_bytes / pace.every_days)
        most = nightly * CATCH_UP_NIGHTS
        passed_s = DAY_S if state.last_run_s is None else max(0, now_s - state.last_run_s)
        credit = min(state.credit_bytes + math.ceil(nightly * passed_s / DAY_S), most)
        # tonight's: never-read files, then the oldest reads; begin none past the limit
        limit = pace.budget_bytes if pace.budget_bytes is not None else math.inf
        chosen, spent = list[Present](), 0
        for item in sorted(present, key=lambda p: (histories[p.pin.path].read_s or 0, p.pin.path)):
            history = histories[item.pin.path]
            # a known bad file would cost its share of every night until it is repaired
            if history.bad_as == item.identity:
                continue
            is_due = now_s - (history.read_s or history.seen_s) >= pace.every_days * DAY_S
            # overdue files may use the catch-up limit: a pause does not postpone them further
            if spent >= min(limit, most if is_due else credit):
                break
            chosen.append(item)
            spent += item.pin.size_bytes
        names = frozenset(item.pin.path for item in chosen)
        # one file at a time: a scrub runs beside an engine, and has all night
        request = WeightsVerifyOptions(paths=names, full=True, direct=True, jobs=1)
        report = verify_files(place, request, neighbours).report
        damage = {finding.path: finding for finding in reversed(report.damage)}
        for item in chosen:
            if bad := damage.get(item.pin.path):
                update = {"bad": bad, "bad_as": item.identity}
            else:
                update = {"bad": None, "bad_as": None, "read_s": now_s}
            histories[item.pin.path] = histories[item.pin.path].model_copy(update=update)
        done = ScrubState(last_run_s=now_s, credit_bytes=credit - spent, files=histories)
        write_bytes(place.state / "scrub.json", canonical_json(done.model_dump()) + b"\n")
    ages = {path: now_s - (h.read_s or h.seen_s) for path, h in histories.items()}
    known = [history.bad for history in histories.values() if history.bad]
    findings = {(f.path, f.kind): f for f in [*known, *odd, *report.findings]}
    return ScrubSlice(
        name=place.lock.name,
        root=str(place.root),
        read=sorted(names),
        bytes_read=spent,
        overdue=sorted(path for path, age in ages.items() if age > pace.every_days * DAY_S),
        oldest_days=round(max(ages.values()) / DAY_S, 1),
        findings=[findings[key] for key in sorted(findings)],
    )


def lower_priority() -> None:
    """Give way to whoever else needs the cores and the disk."""
    with suppress(OSError):
        os.nice(10)
    if number := _IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE_CLASS)
