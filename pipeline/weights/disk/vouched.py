"""What a receipt of `verify` vouches for, without reading a file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pipeline.weights.disk.hashing import Identity
from pipeline.weights.disk.receipt import read_receipt
from pipeline.weights.disk.survey import Finding, extras, survey
from pipeline.weights.model import FilePin
from pipeline.weights.place import Place


@dataclass(frozen=True)
class Looked:
    """A set told apart by size, kind and receipt alone."""

    vouched: list[FilePin]
    unknown: list[FilePin]
    findings: list[Finding]


def vouched(place: Place) -> dict[str, Identity]:
    """The identity of each file as it was proved; none where there is no good receipt."""
    known, wanted = read_receipt(place), {pin.path: pin.want for pin in place.lock.files}
    return {
        path: entry.identity
        for path, entry in known.items()
        if entry.identity is not None and entry.want == wanted.get(path)
    }


def look(place: Place, neighbours: Collection[Place] = ()) -> Looked:
    """Which files are still what a receipt was made for; neighbours share the snapshot."""
    known = vouched(place)
    present, findings = survey(place, place.lock.files)
    shared = [p for p in (place, *neighbours) if p.snapshot == place.snapshot]
    findings += extras(place, {pin.path for p in shared for pin in p.lock.files})
    odd = {finding.path for finding in findings if finding.damage}
    good = [p for p in present if known.get(p.pin.path) == p.identity and p.pin.path not in odd]
    named = {p.pin.path for p in good} | odd
    return Looked(
        [p.pin for p in good],
        [pin for pin in place.lock.files if pin.path not in named],
        findings,
    )
