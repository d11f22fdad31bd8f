"""The newest image that a tag was seen on, on this machine.

Whoever may push can move a tag back to an older image that was once signed under it, and delete
what was signed since: the registry alone cannot tell. What was verified here before is remembered,
so that an older image is not taken for the newest. Names count only while their key is trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, ValidationError

from pipeline.attest.names import IMAGE_SIGNATURE
from pipeline.attest.trust import Trust
from pipeline.errors import StoreDamaged
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.store.store import Store, read_own
from pipeline.verify.naming import Named


class _Name(Frozen):
    """The last name that a key gave."""

    digest: Digest
    at: AwareDatetime
    evidence_set: Digest | None = None


class _Seen(Frozen):
    """One tag, and the newest name under it by each key."""

    reference: str
    names: dict[Digest, _Name] = {}


class Memory:
    """What a store remembers of tags; one file for each. A read-only store learns nothing new."""

    def __init__(self, store: Store, *, is_kept: bool = True) -> None:
        self._store, self._is_kept = store, is_kept

    def recall(self, reference: str, trust: Trust | None, now: datetime) -> list[Named]:
        """The names seen under a tag whose keys are still believed."""
        return [
            Named(key.name, name.digest, reference, key.id, name.at, name.evidence_set)
            for key_id, name in self._read(reference).names.items()
            for key in (trust.find(key_id) if trust else [])
            if not key.objection(IMAGE_SIGNATURE, name.at, now)
        ]

    def remember(self, reference: str, names: Sequence[Named]) -> None:
        """Keep each key's newest; a name without a time may be as old as any and is not kept."""
        timed = [n for n in names if n.reference == reference and n.at]
        if not timed or not self._is_kept:
            return
        with self._store.locked("verified"):
            found = dict(self._read(reference).names)
            for name in timed:
                before = found.get(name.key_id)
                if name.at and (before is None or before.at < name.at):
                    found[name.key_id] = _Name(
                        digest=name.digest, at=name.at, evidence_set=name.evidence_set
                    )
            seen = _Seen(reference=reference, names=found)
            data = canonical_json(seen.model_dump(mode="json"))
            self._store.write(self._path(reference), data)

    def _read(self, reference: str) -> _Seen:
        try:
            found = _Seen.model_validate_json(read_own(self._path(reference)))
        except (OSError, StoreDamaged, ValidationError):
            return _Seen(reference=reference)
        return found if found.reference == reference else _Seen(reference=reference)

    def _path(self, reference: str) -> Path:
        name = sha256_of(reference.encode()).removeprefix("sha256:")
        return self._store.root / "verified" / f"{name}.json"
