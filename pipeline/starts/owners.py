"""Whom the folders of an image belong to, as its layers state it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.assemble.entry import parents
from pipeline.assemble.image import Built
from pipeline.evidence.runs import RunTest
from pipeline.oci.record import FileRow, Kind
from pipeline.oci.tar_reader import open_layer
from pipeline.store.store import Store

NAME = "owners"
_READ_AND_WRITE = 0o3  # to make files in a folder one must be able to write it and to enter it


def read_owners(store: Store, image: Built, folders: Iterable[str]) -> dict[str, FileRow]:
    """The entries of folders and of all above them, by path; the topmost layer decides.

    From the layers themselves: the store's own tables know no owners.
    """
    paths = {path.strip("/") for path in folders} - {""}
    wanted = paths | {above for path in paths for above in parents(path)}
    found: dict[str, FileRow] = {}
    for layer in image.layers:
        record = layer.record
        if not any(row.path in wanted for row in store.contents(record)):
            continue
        with open_layer(store.blob_path(record.digest), record.media_type) as stream:
            found |= {row.path: row for row in stream.entries() if row.path in wanted}
    return found


def give_owners(root: Path, rows: Mapping[str, FileRow]) -> None:
    """Give an unpacked image's folders to those whom its layers name; only root can."""
    for path, row in rows.items():
        place = root / path
        if row.kind == Kind.DIR and place.is_dir() and not place.is_symlink():
            os.chown(place, row.uid, row.gid)
            place.chmod(row.mode)


def judge_owners(
    rows: Mapping[str, FileRow], folders: Sequence[str], uid: int, gid: int
) -> RunTest:
    """Whether a user may make files in every folder, or make the folder itself."""
    wrong = [why for folder in folders if (why := _unwritable(rows, folder, uid, gid))]
    if wrong:
        return RunTest(name=NAME, verdict="failed", message="; ".join(dict.fromkeys(wrong)))
    message = f"{uid}:{gid} may write to {', '.join(folders)}"
    return RunTest(name=NAME, verdict="passed", message=message)


def _unwritable(rows: Mapping[str, FileRow], folder: str, uid: int, gid: int) -> str:
    path = folder.strip("/")
    while path and path not in rows:
        path = posixpath.dirname(path)
    row = rows.get(path)
    if row is None:
        return f"{folder}: there is nothing above it but the root"
    # as the kernel does: the owner's bits count for the owner alone
    shift = 6 if row.uid == uid else 3 if row.gid == gid else 0
    if uid == 0 or row.mode >> shift & _READ_AND_WRITE == _READ_AND_WRITE:
        return ""
    owner = f"{row.uid}:{row.gid}, mode {row.mode & 0o7777:04o}"
    return f"{folder}: /{path} belongs to {owner}, and {uid}:{gid} may not write there"
