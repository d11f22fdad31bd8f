"""An image as an OCI layout folder of its own, for skopeo, a USB stick or another machine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.build.image import Built
from pipeline.errors import StoreUnwritable
from pipeline.files import link_or_copy, os_errors_explained, write_bytes
from pipeline.model import canonical_json
from pipeline.store.store import Store


def export_layout(store: Store, built: Built, folder: Path) -> None:
    """Write the layout; blobs are hard links where the disk allows, copies elsewhere."""
    if folder.exists() and any(folder.iterdir()):
        raise StoreUnwritable(f"{folder}: is not empty", "Name a new or empty folder.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    blobs = partial / "blobs" / "sha256"
    record = store.image_record(built.name, built.platform) or {}
    manifest = store.read_json(built.digest)
    digests = {
        built.digest,
        manifest["config"]["digest"],
        *(x["digest"] for x in manifest["layers"]),
    }
    try:
        with os_errors_explained(folder):
            blobs.mkdir(parents=True)
            for digest in sorted(digests):
                link_or_copy(store.blob_path(digest), blobs / digest.removeprefix("sha256:"))
            write_bytes(partial / "oci-layout", b'{"imageLayoutVersion":"1.0.0"}\n')
            index = {"schemaVersion": 2, "manifests": [record["descriptor"]]}
            write_bytes(partial / "index.json", canonical_json(index))
            if folder.exists():
                folder.rmdir()
            os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
