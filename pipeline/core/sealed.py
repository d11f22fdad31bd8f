"""Locks that carry the digest of all else in them: we refuse one that somebody edited by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

from pipeline.core.errors import LockEdited, LockMissing, SpecInvalid
from pipeline.core.model import Frozen, canonical_json, sha256_of
from pipeline.core.yaml_file import read_yaml

# Of a draft, until `sealed` has computed the real one.
UNSEALED = "sha256:" + "0" * 64


class Sealed(Frozen):
    """What has a seal. Each kind declares the field itself, last, as it stands in its file."""

    if TYPE_CHECKING:
        seal: str

    def computed_seal(self) -> str:
        """The digest of all else in the lock."""
        # over the values, not the text: comments and layout of the file may change
        return sha256_of(canonical_json(self.model_dump(exclude={"seal", *self.unsealed()})))

    def unsealed(self) -> set[str]:
        """The fields that the seal does not cover."""
        return set()

    def sealed(self) -> Self:
        """This draft with its seal."""
        return self.model_copy(update={"seal": self.computed_seal()})


Lock = TypeVar("Lock", bound=Sealed)


def read_sealed(path: Path, model: type[Lock], *, missing: str = "", edited: str = "") -> Lock:
    """Reads a lock that is whole and unedited; the error has its own hint, or the one given."""
    if not path.exists():
        raise LockMissing(f"{path.name}: there is no such lock", missing)
    try:
        lock = read_yaml(path, model)
    except SpecInvalid as error:
        raise LockEdited(str(error), edited) from error
    if lock.computed_seal() != lock.seal:
        raise LockEdited(f"{path.name}: its contents do not match its seal", edited)
    return lock


def read_or_none(read: Callable[[Path], Lock], path: Path) -> Lock | None:
    """Reads the lock that a new one replaces; a missing or damaged one counts as none."""
    try:
        return read(path)
    except (LockMissing, LockEdited):
        return None
