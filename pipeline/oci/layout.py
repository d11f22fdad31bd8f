"""An image as an OCI layout folder of its own, for skopeo, a USB stick or another machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.errors import StoreDamaged, StoreUnwritable
from pipeline.files import link_or_copy, os_errors_explained, sha256_of_file, write_bytes
from pipeline.model import canonical_json
from pipeline.store.mark import LAYOUT
from pipeline.store.store import Store

_NAMES = {"blobs", "oci-layout", "index.json"}


def export_layout(store: Store, built: Built, folder: Path) -> None:
    """Write the layout; blobs are hard links where the disk allows, copies elsewhere.

    Each blob is read once where it now lies, so what is handed on is what its digest says.
    """
    folder = folder.absolute()  # `.` has no name to put another one beside
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StoreUnwritable(f"{folder}: is not a folder", "Name a new or empty folder.")
    if folder.exists() and any(folder.iterdir()):
        raise StoreUnwritable(f"{folder}: is not empty", "Name a new or empty folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    _clear(partial)
    record = store.image_record(built.name, built.platform) or {}
    manifest = store.read_json(built.digest)
    sizes = {x["digest"]: x["size"] for x in (manifest["config"], *manifest["layers"])}
    try:
        with os_errors_explained(folder):
            _write_blobs(store, [built.digest, *sizes], partial / "blobs" / "sha256")
            write_bytes(partial / "oci-layout", LAYOUT)
            # as the manifest is, whatever the store remembers of it
            n_bytes = len(store.read_blob(built.digest))
            described = {
                "mediaType": manifest["mediaType"],
                "digest": built.digest,
                "size": n_bytes,
            }
            index = {"schemaVersion": 2, "manifests": [{**record["descriptor"], **described}]}
            write_bytes(partial / "index.json", canonical_json(index))
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _clear(partial: Path) -> None:
    """Remove what a killed export left; a folder of that name with other things in it stays."""
    is_folder = partial.is_dir() and not partial.is_symlink()
    is_ours = is_folder and {p.name for p in partial.iterdir()} <= _NAMES
    if not is_ours and (partial.exists() or partial.is_symlink()):
        raise StoreUnwritable(f"{partial}: is in the way", "Move it, or name another folder.")
    shutil.rmtree(partial, ignore_errors=True)


def _write_blobs(store: Store, digests: Iterable[str], blobs: Path) -> None:
    blobs.mkdir(parents=True)
    sources = {digest: store.blob_path(digest) for digest in digests}
    try:
        total = sum(path.stat().st_size for path in sources.values())
    except FileNotFoundError as error:
        raise StoreDamaged(f"{error.filename}: not in the store") from error
    with (
        log.progress("written", total) as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):

        def write(digest: str) -> None:
            target = blobs / digest.removeprefix("sha256:")
            link_or_copy(sources[digest], target)
            if target.is_symlink() or sha256_of_file(target) != digest:
                raise StoreDamaged(f"{sources[digest]}: is not what its name says")
            bar.advance(target.stat().st_size)

        try:
            list(pool.map(write, sources))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
