"""A compiled tree's files in a folder, for use outside of an image."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from pipeline.assemble.layer import read_pieces
from pipeline.files import atomic_file, os_errors_explained
from pipeline.oci.record import FileRow, Kind, LayerRecord
from pipeline.store.store import Store


def export_tree(store: Store, record: LayerRecord, below: str, folder: Path) -> dict[Path, FileRow]:
    """Write the files of a tree without the image's folders above them; each is hashed again."""
    written = {}
    for row in store.contents(record):
        if row.kind != Kind.FILE:
            continue
        place = folder / PurePosixPath(row.path).relative_to(below.strip("/"))
        with os_errors_explained(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(place) as out:
                for piece in read_pieces(store.blob_path(record.digest), row):
                    out.write(piece)
            place.chmod(row.mode)
        written[place] = row
    return written
