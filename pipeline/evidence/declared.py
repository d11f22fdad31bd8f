"""The licences of an image's parts, read from the files that the image itself holds."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence

from pipeline.assemble.layer import read_file
from pipeline.evidence.inventory import Part
from pipeline.evidence.licence import Licence, deb_licence, wheel_licence
from pipeline.oci.record import FileRow, Kind
from pipeline.store.store import Store

_MOST_BYTES = 4 << 20
_MOST_LINKS = 8


def licences_of(store: Store, parts: Sequence[Part]) -> dict[str, Licence]:
    """Each part's licence, by the part's package URL."""
    found: dict[str, Licence] = {}
    for digest in dict.fromkeys(part.layer.record.digest for part in parts):
        rows = {row.path: row for row in store.contents(digest)}
        metadata = {
            row.owner: row for path, row in rows.items() if path.endswith(".dist-info/METADATA")
        }
        for part in parts:
            if part.layer.record.digest != digest:
                continue
            row = metadata.get(part.pin.name) if part.is_wheel else _copyright(rows, part.pin.name)
            found[part.purl] = _read(store, digest, part, row)
    return found


def _read(store: Store, digest: str, part: Part, row: FileRow | None) -> Licence:
    what = "METADATA" if part.is_wheel else "copyright file"
    if row is None:
        return Licence(reason=f"the image holds no {what} of it")
    if row.size_bytes > _MOST_BYTES:
        return Licence(reason=f"its {what} is larger than {_MOST_BYTES} bytes")
    data = read_file(store.blob_path(digest), row)
    return wheel_licence(data) if part.is_wheel else deb_licence(data)


def _copyright(rows: Mapping[str, FileRow], package: str) -> FileRow | None:
    """A .deb's copyright file; packages of one source often link to one another's."""
    path = f"usr/share/doc/{package}/copyright"
    for _ in range(_MOST_LINKS):
        row = rows.get(path)
        if row is not None and row.kind in (Kind.FILE, Kind.HARDLINK):
            return rows.get(row.target) if row.kind == Kind.HARDLINK else row
        folder, _, name = path.rpartition("/")
        if row is not None and row.kind == Kind.SYMLINK:
            path = _followed(path, row.target)
        elif (above := rows.get(folder)) is not None and above.kind == Kind.SYMLINK:
            path = f"{_followed(folder, above.target)}/{name}"
        else:
            return None
    return None


def _followed(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join("/", posixpath.dirname(path), target)).lstrip("/")
