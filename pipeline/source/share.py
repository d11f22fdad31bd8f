"""Objects as plain files for another machine: a strong one compiles, the others import.

    manifest.json        every object by its path, sha256 and size
    manifest.dsse.json   a signed statement about the manifest, where there was a key
    0/3/….R              the objects, as ccache keeps them

An import believes nothing but the manifest: a file that is missing, larger or other than it says
stops it before the first object is put in place.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from pipeline import foreign_json, log
from pipeline.errors import DigestMismatch, ObjectsUnusable
from pipeline.files import os_errors_explained, read_plain, write_bytes
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.source.objects import (
    ENTRY,
    ImportedObjects,
    entries,
    imports_folder,
    objects_folder,
)
from pipeline.store.store import Store

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer

MANIFEST, ENVELOPE = "manifest.json", "manifest.dsse.json"
_CHUNK_BYTES = 1 << 20
# A line of some 150 bytes for each object; an engine has some hundreds.
_MOST_MANIFEST_BYTES = 256 << 20
# The largest object of an engine has some ten megabytes.
_MOST_OBJECT_BYTES = 4 << 30
_HINT = "Nothing was imported. Copy the folder again, or export it again where it was made."

EntryPath = Annotated[str, StringConstraints(pattern=f"^{ENTRY.pattern}$")]


class ObjectFile(Frozen):
    """One object in an export."""

    sha256: Digest
    size_bytes: Annotated[int, Field(ge=0, le=_MOST_OBJECT_BYTES)]


class ObjectsManifest(Frozen):
    """All objects of an export."""

    format: Literal[1] = 1
    files: dict[EntryPath, ObjectFile]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    def dump(self) -> bytes:
        return canonical_json(self.model_dump(mode="json")) + b"\n"


@dataclass(frozen=True)
class Shared:
    """An export or import in numbers."""

    manifest: str  # its digest
    objects: int
    new: int  # that were not there before
    size_bytes: int
    signed_by: tuple[str, ...] = ()


def export_objects(store: Store, folder: Path, signers: Sequence[Signer] = ()) -> Shared:
    """Write all objects of the store into a new folder; the manifest comes last."""
    with os_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ObjectsUnusable(f"{folder}: is not empty", "Name a new folder for the export.")
    source, files = objects_folder(store), dict[str, ObjectFile]()
    names = entries(source)
    if not names:
        raise ObjectsUnusable(
            f"{source}: holds no objects", "`sm120 source build SOURCE BUILD` makes some."
        )
    with log.step(f"Exporting {log.count(len(names) // 2 or 1, 'object')}"):
        for name in names:
            target = folder / name
            with os_errors_explained(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    files[name] = _copy(source / name, target)
                except FileNotFoundError:  # ccache made room meanwhile
                    target.unlink(missing_ok=True)
    manifest = ObjectsManifest(files=files)
    data = manifest.dump()
    if signers:
        _sign(folder, data, manifest, signers)
    write_bytes(folder / MANIFEST, data)
    keys = tuple(signer.key_id for signer in signers)
    return Shared(sha256_of(data), len(files), len(files), manifest.size_bytes, keys)


def _sign(folder: Path, data: bytes, manifest: ObjectsManifest, signers: Sequence[Signer]) -> None:
    from pipeline.attest.envelope import enclose
    from pipeline.attest.names import OBJECTS
    from pipeline.attest.statement import make_statement, moment

    body = {"objects": len(manifest.files), "size_bytes": manifest.size_bytes}
    statement = make_statement(MANIFEST, sha256_of(data), OBJECTS, body, moment())
    write_bytes(folder / ENVELOPE, enclose(statement, signers).dump())


def read_manifest(folder: Path) -> tuple[ObjectsManifest, str]:
    """The manifest of an export, and its digest."""
    path = folder / MANIFEST
    try:
        data = read_plain(path, _MOST_MANIFEST_BYTES)
    except OSError as error:
        raise ObjectsUnusable(f"{path}: {error.strerror}", _HINT) from error
    if data is None:
        raise ObjectsUnusable(f"{path}: is no plain file of a manifest's size", _HINT)
    try:
        value = foreign_json.read_json(data, most_bytes=_MOST_MANIFEST_BYTES)
        return ObjectsManifest.model_validate(value), sha256_of(data)
    except (foreign_json.JsonInvalid, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise ObjectsUnusable(f"{path}: is no manifest of objects ({reason})", _HINT) from error


def import_objects(
    store: Store,
    folder: Path,
    manifest: ObjectsManifest,
    digest: str,
    signed_by: Sequence[str] = (),
) -> Shared:
    """Take over all objects of an export, or none."""
    objects = objects_folder(store)
    new = [name for name in manifest.files if not (objects / name).exists()]
    store.need_space(sum(manifest.files[name].size_bytes for name in new))
    with (
        store.locked("objects-import"),
        store.scratch() as scratch,
        log.step(f"Importing {log.count(len(manifest.files), 'file')}"),
    ):
        # all are checked, also those that are there already: a damaged export is not half good
        for number, (name, want) in enumerate(manifest.files.items()):
            _checked(folder, name, want, scratch / str(number))
        _remember(store, manifest, digest, new, signed_by)
        wanted = set(new)
        for number, name in enumerate(manifest.files):
            if name in wanted:
                target = objects / name
                with os_errors_explained(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(scratch / str(number), target)
    return Shared(digest, len(manifest.files), len(new), manifest.size_bytes, tuple(signed_by))


def _remember(
    store: Store,
    manifest: ObjectsManifest,
    digest: str,
    new: Sequence[str],
    signed_by: Sequence[str],
) -> None:
    """Whose objects these are, before they can be used."""
    path = imports_folder(store) / f"{digest.removeprefix('sha256:')}.json"
    # an import that goes on after a kill finds some in place already, which are still not ours
    if path.exists():
        before = ImportedObjects.model_validate_json(path.read_bytes())
        new = sorted({*before.files, *new})
    record = ImportedObjects(
        manifest=digest,
        signed_by=list(signed_by),
        files={name: manifest.files[name].sha256 for name in new},
    )
    store.write(path, record.model_dump_json().encode())


def _checked(folder: Path, name: str, want: ObjectFile, target: Path) -> None:
    source = folder / name
    try:
        got = _copy(source, target, want.size_bytes)
    except OSError as error:
        raise ObjectsUnusable(f"{source}: {error.strerror}", _HINT) from error
    if got != want:
        raise DigestMismatch(
            f"{source}: the manifest has {want.sha256} of {want.size_bytes} bytes,"
            f" the file is {got.sha256} of {got.size_bytes}",
            _HINT,
        )


def _copy(source: Path, target: Path, most_bytes: int = _MOST_OBJECT_BYTES) -> ObjectFile:
    """Copy a plain file and hash what was written; of a longer one, a byte more than allowed."""
    # a pipe would be waited for, and a link could lead to any file of the reader's
    handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    sha, size = hashlib.sha256(), 0
    with os.fdopen(handle, "rb") as file, target.open("wb") as out:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ObjectsUnusable(f"{source}: is not a plain file", _HINT)
        while chunk := file.read(min(_CHUNK_BYTES, most_bytes + 1 - size)):
            sha.update(chunk)
            size += len(chunk)
            out.write(chunk)
            if size > most_bytes:
                break
    if size > _MOST_OBJECT_BYTES:
        raise ObjectsUnusable(f"{source}: is larger than any object", _HINT)
    return ObjectFile(sha256=f"sha256:{sha.hexdigest()}", size_bytes=size)
