"""Weights in folders: which locked sets they hold, whether they are intact, and who vouches.

`verify` and `scrub` run in nightly timers: this module loads neither an HTTP client nor key
material until it needs one.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.app.signing import Signing, trust_of
from pipeline.app.statements import FileStatement, state_weights
from pipeline.app.workspace import Workspace
from pipeline.core import log
from pipeline.core.errors import LockStale, StoreUnwritable, WeightsDamaged, WeightsUnknown
from pipeline.core.files import ANOTHER_PLACE, cores, write_bytes
from pipeline.weights.check.scrub import ScrubPace, ScrubSlice, lower_priority
from pipeline.weights.check.scrub import read_slice as read_slice
from pipeline.weights.check.verify import (
    Backing,
    Checked,
    VerifyReport,
    WeightsVerifyOptions,
    checkout_backing,
)
from pipeline.weights.check.verify import verify_files as prove
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.model import kept_locks, read_weights_lock
from pipeline.weights.place import LockedFolder, find_places, lock_place
from pipeline.weights.sign import record as records
from pipeline.weights.sign.record import reasons, weights_record_path

if TYPE_CHECKING:
    from pipeline.artifacts.attest.predicates import WeightsVerification
    from pipeline.artifacts.attest.statement import Statement
    from pipeline.weights.check.repair import Repaired
    from pipeline.weights.sign.signing import Signed

_NO_LOCK = "Name a lock as `sm120 weights lock` writes it: lockfiles/weights/NAME.lock.yaml."
_WRITABLE = "mount it for writing, or fetch the set to another disk"
_MODE = "Change its owner or mode: this command keeps what it found out beside the files."
_ASIDE = "`sm120 weights verify DIR --repair` moves what no lock names to DIR/.sm120/aside."
_NO_SOURCE = "A repair needs a source that has the right bytes: name another one with --from"


@dataclass(frozen=True)
class VerifiedWeights:
    """The sets of a folder as they are now, the repairs, and who vouches for their locks."""

    reports: list[VerifyReport]
    backings: list[Backing]
    repaired: list[Repaired]
    statements: list[FileStatement]
    hint: str  # what to try after a repair that failed

    def require_whole(self) -> None:
        """Raise WeightsDamaged where a set is not as locked."""
        require_whole(self.reports, self.hint)


def places_in(workspace: Workspace, folder: Path) -> list[LockedFolder]:
    """Find a folder's sets, by the locks next to the files or else the checkout's."""
    checkout = workspace.checkout_or_none()
    return find_places(folder, kept_locks(checkout) if checkout else ())


@contextmanager
def hints_of_folder(elsewhere: str, mode: str) -> Iterator[None]:
    """Fit hints about the store to weights, which are where the user put them."""
    try:
        yield
    except StoreUnwritable as error:
        is_general = error.hint == StoreUnwritable.hint
        hint = mode if is_general else error.hint.replace(ANOTHER_PLACE, elsewhere)
        raise StoreUnwritable(str(error), hint) from error


def backing_of(workspace: Workspace, place: LockedFolder, *, strict: bool = True) -> Backing:
    """Whether the checkout vouches for the lock of a set; raises where it contradicts the lock.

    Unless `strict`, only mentions a checkout that has another revision by now.
    """
    try:
        return checkout_backing(place, workspace.checkout_or_none())
    except LockStale as error:
        if strict:
            raise
        log.say(f"{error}")
        return Backing()


def signed_backing_of(
    workspace: Workspace, place: LockedFolder, trust_path: Path | None
) -> Backing:
    """As `backing_of`, but signatures next to the set count, too."""
    backing = backing_of(workspace, place)
    signatures = (place.state / name for name in ("model.sig", "record.dsse.json"))
    # the strongest backing is there already; signatures could only add to it
    if backing.lock_from == "checkout" or not any(path.exists() for path in signatures):
        return backing
    # loads what reads signatures, which a set that the checkout backs does not need
    from pipeline.evidence.verify.weights_backing import signed_backing

    trust = trust_of(workspace, trust_path)
    return signed_backing(place, backing, trust, datetime.now(UTC)) if trust else backing


def verify_weights(
    workspace: Workspace,
    folder: Path,
    *,
    lock_file: Path | None = None,
    only: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    full: bool = False,
    repair: bool = False,
    dry_run: bool = False,
    neighbours: tuple[str, ...] = (),
    offline: bool = False,
    jobs: int | None = None,
    trust_path: Path | None = None,
) -> VerifiedWeights:
    """Check the files of a folder against their lock, and state the result next to them.

    With `repair`, downloads what is damaged; with `dry_run`, only plans that.
    """
    signing = Signing()
    request = WeightsVerifyOptions(only=only, exclude=exclude, full=full, jobs=jobs or cores())
    if lock_file is None:
        try:
            places = places_in(workspace, folder)
        # only `verify` takes a lock from elsewhere, so only its hint names the option
        except WeightsUnknown as error:
            hint = f"{error.hint} --lock names a lock that is elsewhere."
            raise WeightsUnknown(str(error), hint) from error
        backings = [signed_backing_of(workspace, place, trust_path) for place in places]
    else:
        places = [lock_place(folder, read_weights_lock(lock_file, edited=_NO_LOCK))]
        # the user vouches for a lock by naming it
        backings = [Backing(lock_from="given") for _ in places]
    checked = [_verified(place, request, places) for place in places]
    repaired: list[Repaired] = []
    # after the whole check: know the damage before downloading anything
    for i, place in enumerate(places) if repair else ():
        if checked[i].report.is_whole:
            continue
        with hints_of_folder(_WRITABLE, _MODE):
            # these load the HTTP client, which a verify that finds nothing wrong does not need
            from pipeline.weights.check.repair import RouteSupply, repair_damage
            from pipeline.weights.transfer.sources import open_routes

            client, routes = open_routes(place.lock, neighbours=neighbours, offline=offline)
            verb = "What a repair would take" if dry_run else "Repairing"
            with log.step(f"{verb}: {place.lock.name}"):
                supply = RouteSupply(routes, client)
                repaired += repair_damage(place, checked[i], supply, dry_run=dry_run)
        if not dry_run:
            # without `full`: the files just read have a receipt
            again = WeightsVerifyOptions(only=only, exclude=exclude, jobs=request.jobs)
            checked[i] = _verified(place, again, places)
    reports = [c.report for c in checked]
    stated = []
    # a part of a set, or a lock that was named here, gives no statement about the whole set
    if not only and not exclude and lock_file is None:
        stated = [
            state_weights(
                place,
                signing,
                read=report.files_read,
                by_receipt=report.by_receipt,
                why=reasons(report.damage),
            )
            for place, report in zip(places, reports, strict=True)
        ]
    # do not suggest the repair that has just failed
    tried = f"{_NO_SOURCE}{', or leave out --offline' if offline else ''}."
    hint = tried if repair and not dry_run else ""
    return VerifiedWeights(reports, backings, repaired, stated, hint)


def _verified(
    place: LockedFolder, request: WeightsVerifyOptions, places: list[LockedFolder]
) -> Checked:
    with log.step(f"Verifying {place.lock.name}, {log.size(place.lock.size_bytes)}"):
        # others of the folder: files that belong to them are expected
        return prove(place, request, [p for p in places if p != place])


def require_whole(reports: Sequence[VerifyReport | ScrubSlice], hint: str = "") -> None:
    """Raise WeightsDamaged where files are not as locked."""
    for report in reports:
        damage = [finding for finding in report.findings if finding.damage]
        if damage:
            only_extra = all(finding.kind == "extra" for finding in damage)
            hint = hint or (_ASIDE if only_extra else "")
            counts = Counter(finding.kind for finding in damage)
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            files = log.count(len({f.path for f in damage}), "file is", "files are")
            message = f"{report.name}: {files} not as locked: {kinds} ({report.root})"
            raise WeightsDamaged(message, hint)


def scrub_weights(
    workspace: Workspace, folders: Sequence[Path], every_days: int = 30, budget: int | None = None
) -> list[ScrubSlice]:
    """Read a part of the files from the disk, so that all are read every N days."""
    # it runs for hours beside engines that answer users
    lower_priority()
    slices = []
    for folder in folders:
        places = places_in(workspace, folder)
        for place in places:
            log.say(f"{place.lock.name}: {backing_of(workspace, place, strict=False).sentence()}")
            with log.step(f"Scrubbing {place.lock.name}"):
                others = [p for p in places if p != place]
                with hints_of_folder(_WRITABLE, _MODE):
                    done = read_slice(
                        place, ScrubPace(every_days, budget), int(time.time()), others
                    )
            # one budget for all folders, which share one night
            budget = None if budget is None else max(0, budget - done.bytes_read)
            slices.append(done)
    return slices


def find_set(workspace: Workspace, folder: Path, name: str | None = None) -> LockedFolder:
    """Find a folder's locked set, by its name if a Hub cache holds several."""
    return _one(places_in(workspace, folder), folder, name)


def _one(sets: list[LockedFolder], folder: Path, name: str | None) -> LockedFolder:
    chosen = [p for p in sets if name in (None, p.lock.name)]
    names = ", ".join(p.lock.name for p in sets)
    if not chosen:
        raise WeightsUnknown(f"{folder}: holds no set {name!r}", f"There are: {names}.")
    if len(chosen) > 1:
        raise WeightsUnknown(f"{folder}: holds several sets", f"Choose with --set: {names}.")
    return chosen[0]


def sign_weights(
    workspace: Workspace,
    folder: Path,
    key: Path,
    signature: Path | None = None,
    name: str | None = None,
    *,
    full: bool = False,
) -> tuple[LockedFolder, Signed]:
    """Sign a whole set in the OpenSSF model-signing format."""
    from pipeline.artifacts.attest.keys import ANY_NIST, read_private_file
    from pipeline.weights.sign import signing

    place = find_set(workspace, folder, name)
    log.say(f"{place.lock.name}: {backing_of(workspace, place).sentence()}")
    passphrase = os.environ.get("SM120_KEY_PASSPHRASE", "").encode() or None
    loaded = read_private_file(key, passphrase, ANY_NIST)
    target = signature or signing.default_signature(place)
    return place, signing.sign_folder(place, loaded, target, full=full)


def check_signature(
    workspace: Workspace,
    folder: Path,
    public_key: Path,
    signature: Path | None = None,
    name: str | None = None,
    *,
    full: bool = False,
) -> Signed:
    """Check a folder against a model-signing signature, whoever made it."""
    from pipeline.artifacts.attest.keys import ANY_NIST, read_key_file, read_public
    from pipeline.weights.sign import signing

    place: LockedFolder | None = None
    try:
        place = find_set(workspace, folder, name)
    except WeightsUnknown:
        # a signed folder need not be a locked one, where its signature is named or next to it
        if name or (signature is None and not (folder / signing.NAME).exists()):
            raise
    target = signature or (signing.default_signature(place) if place else folder / signing.NAME)
    # hashes that a receipt proves for unchanged files; `full` reads them all again
    known: dict[str, str] = {}
    if place and not full:
        known = {pin.path: pin.sha256 for pin in check_by_receipt(place).proved if pin.sha256}
    signer = read_public(read_key_file(public_key), str(public_key), ANY_NIST)
    return signing.compare_signature(place.snapshot if place else folder, target, signer, known)


class AttestedSet(NamedTuple):
    """A statement about a set, what it says and, if a key signed it, its file."""

    place: LockedFolder
    verification: WeightsVerification
    statement: Statement
    signed: Path | None


def attest_set(
    workspace: Workspace,
    folder: Path,
    name: str | None = None,
    *,
    full: bool = False,
    key_path: Path | None = None,
) -> AttestedSet:
    """State what a set is and how it was verified just now; with a key, sign and keep that."""
    from pipeline.artifacts.attest.envelope import enclose
    from pipeline.artifacts.attest.keys import find_signer

    sets = places_in(workspace, folder)
    place = _one(sets, folder, name)
    backing_of(workspace, place)
    verification = records.verification(place, sets, full=full)
    statement = records.weights_statement(place, verification)
    # without a key, the unsigned one next to the set stays
    signer = find_signer(key_path, os.environ)
    if signer is None:
        return AttestedSet(place, verification, statement, None)
    path = weights_record_path(place)
    write_bytes(path, enclose(statement, [signer]).dump())
    return AttestedSet(place, verification, statement, path)
