"""Finding and opening the envelopes that speak of an artifact."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.attest.envelope import SUFFIX, Envelope, read_envelope
from pipeline.attest.strict import MAX_BYTES, plain
from pipeline.errors import EvidenceBroken, RecordInvalid
from pipeline.verify.artifact import read_bounded

MOST_FILES = 1000


@dataclass(frozen=True)
class EvidenceItem:
    """One piece of evidence: an envelope, or why it cannot be read."""

    name: str
    envelope: Envelope | None
    error: str = ""


def read_item(name: str, data: bytes) -> EvidenceItem:
    """Bytes of unknown origin as evidence; a file's name can be as hostile as its bytes."""
    name = plain(name).replace("\n", " ")
    try:
        return EvidenceItem(name, read_envelope(data, name))
    except RecordInvalid as error:
        return EvidenceItem(name, None, str(error))


def distinct(items: Sequence[EvidenceItem]) -> list[EvidenceItem]:
    """Without envelopes whose statement is there with the same signatures and more.

    A registry keeps a statement also as it was before a second key signed it.
    """
    found: list[EvidenceItem] = []
    for each in items:
        if any(_is_less(each, other) for other in found):
            continue
        found = [*(other for other in found if not _is_less(other, each)), each]
    return found


def _is_less(one: EvidenceItem, other: EvidenceItem) -> bool:
    if one.envelope is None or other.envelope is None:
        return False
    same = one.envelope.payload == other.envelope.payload
    return same and set(one.envelope.signatures) <= set(other.envelope.signatures)


def gather(places: Sequence[Path]) -> list[EvidenceItem]:
    """Envelopes from files and folders, in order of their names."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            found += sorted(place.glob(f"*{SUFFIX}"))
        elif place.exists():
            found.append(place)
        else:
            hint = "Name an envelope (*.dsse.json), or a folder of them."
            raise EvidenceBroken(f"{place}: there is no such evidence", hint)
    if len(found) > MOST_FILES:
        raise RecordInvalid(f"{len(found)} pieces of evidence, more than {MOST_FILES}")
    return [_read(path) for path in found]


def _read(path: Path) -> EvidenceItem:
    if not stat.S_ISREG(path.lstat().st_mode):
        return EvidenceItem(plain(path.name), None, "is a link or no plain file")
    return read_item(path.name, read_bounded(path, MAX_BYTES))


def beside(artifact: Path) -> list[Path]:
    """Where evidence of a file or folder is looked for unless it is named."""
    places = [artifact.with_name(f"{artifact.name}{SUFFIX}")]
    places += [artifact.with_name(f"{artifact.name}.records")]
    if artifact.is_dir():
        places.append(artifact / "records")
    return [place for place in places if place.exists()]
