"""An image as an OCI layout folder of its own, for skopeo, a USB stick or another machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from pipeline.artifacts.oci.document import index_json, read_document
from pipeline.artifacts.oci.record import ImageRecord
from pipeline.core import files, log
from pipeline.core.errors import DiskFull, StoreDamaged, StoreUnwritable

# The file that makes a folder an OCI layout, as this project has always written it.
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}\n'
# What an export that was killed may have left in its own folder, and nothing else.
_NAMES = {"blobs", "oci-layout", "index.json", "records"}


class Blobs(Protocol):
    """Where an image's blobs are read from: the store, for one."""

    def blob_path(self, digest: str) -> Path: ...

    def read_blob(self, digest: str) -> bytes: ...


def export_layout(
    blobs: Blobs, record: ImageRecord, folder: Path, evidence: Iterable[Path] = ()
) -> None:
    """Writes the layout; blobs are hard links where the disk allows, copies elsewhere.

    Each blob is read once where it now lies, so that it matches its digest. Evidence is copied to
    `records`, where `sm120 verify` looks for it; other programs ignore that folder. A folder that
    has this image whole stays, so that a plan whose machine went down goes on.
    """
    folder = folder.absolute()  # `.` has no name to put another one beside
    image = read_document(blobs.read_blob(record.digest))
    # type and size as the manifest is, whatever the record claims of it
    shown = {"media_type": image.media_type, "size_bytes": len(image.data)}
    index = index_json([record.descriptor.model_copy(update=shown)])
    digests = [image.digest, *(blob.digest for blob in image.blobs)]
    with suppress(OSError):
        there = folder / "blobs" / "sha256"
        paths = {digest: there / digest.removeprefix("sha256:") for digest in digests}
        is_same = files.read_plain(folder / "index.json", len(index)) == index
        if is_same and not any(path.is_symlink() for path in (folder, there, *paths.values())):
            # every byte is read again: a disk that lost its power may have the names alone
            found = files.on_all_cores(files.sha256_of_file, paths.values())
            if found == digests:
                for path in evidence:
                    files.write_bytes(folder / "records" / path.name, path.read_bytes())
                return
    is_other = folder.is_symlink() or (folder.exists() and not folder.is_dir())
    if is_other or (folder.exists() and any(folder.iterdir())):
        fault = "is not a folder" if is_other else "is not empty"
        raise StoreUnwritable(f"{folder}: {fault}", "Name a new or empty folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    is_folder = partial.is_dir() and not partial.is_symlink()
    is_ours = is_folder and {p.name for p in partial.iterdir()} <= _NAMES
    # a killed export may have left it; a folder of that name with other things in it stays
    if not is_ours and (partial.exists() or partial.is_symlink()):
        raise StoreUnwritable(f"{partial}: is in the way", "Move it, or name another folder.")
    shutil.rmtree(partial, ignore_errors=True)
    sources = {digest: blobs.blob_path(digest) for digest in digests}
    try:
        with files.os_errors_explained(folder):
            source = blobs.blob_path(image.digest).parent
            files.need_space_for_copies(source, folder, sum(b.size_bytes for b in image.blobs))
            target = partial / "blobs" / "sha256"
            target.mkdir(parents=True)
            for digest, path in sources.items():
                if not path.exists():
                    raise StoreDamaged(f"{image.part(digest)} is missing: there is no {path}")
            total = sum(path.stat().st_size for path in sources.values())
            with log.progress("written", total) as bar:

                def write(digest: str) -> None:
                    path = target / digest.removeprefix("sha256:")
                    files.link_or_copy(sources[digest], path)
                    # after the copy: the bytes that lie there now count
                    if path.is_symlink() or files.sha256_of_file(path) != digest:
                        what = f"{image.part(digest)} is damaged"
                        raise StoreDamaged(f"{what}: {sources[digest]} does not match its digest")
                    bar.advance(path.stat().st_size)

                files.on_all_cores(write, sources)
            files.write_bytes(partial / "oci-layout", LAYOUT)
            files.write_bytes(partial / "index.json", index)
            for path in evidence:
                files.write_bytes(partial / "records" / path.name, path.read_bytes())
            # onto an empty folder, too: rename(2) allows that
            os.replace(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, DiskFull):
            error.hint = "Nothing was written. Free some space there, or name another folder."
        raise
