"""A built image as one tar stream that both old and new Docker, Podman and skopeo take.

It is an OCI layout with Docker's `manifest.json` beside it. The layers go in as they are: no
recompression, no temporary copy.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path

from pipeline.assemble.image import Built
from pipeline.assemble.tar import BLOCK, END, MTIME, padding
from pipeline.errors import StoreDamaged
from pipeline.model import canonical_json
from pipeline.store.store import Store

_CHUNK_BYTES = 1 << 20


def docker_archive(store: Store, built: Built, tags: list[str]) -> Iterator[bytes]:
    """The archive's bytes, piece by piece."""
    manifest = store.read_json(built.digest)
    config = manifest["config"]
    descriptor = {
        "mediaType": manifest["mediaType"],
        "digest": built.digest,
        "size": len(store.read_blob(built.digest)),
        "annotations": {"io.containerd.image.name": tags[0]} if tags else {},
    }
    docker = {
        "Config": _blob_name(config["digest"]),
        "RepoTags": tags,
        "Layers": [_blob_name(x["digest"]) for x in manifest["layers"]],
    }
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    yield from _bytes("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    yield from _bytes("index.json", canonical_json(index))
    yield from _bytes("manifest.json", canonical_json([docker]))
    blobs = {x["digest"]: x["size"] for x in [descriptor, config, *manifest["layers"]]}
    for digest, size_bytes in blobs.items():
        yield from _file(digest, store.blob_path(digest), size_bytes)
    yield END


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _head(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size_bytes, MTIME, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def _bytes(name: str, data: bytes) -> Iterator[bytes]:
    yield _head(name, len(data)) + data + padding(len(data))


def _file(digest: str, path: Path, size_bytes: int) -> Iterator[bytes]:
    """A blob, hashed on its way; what is not its digest breaks the archive off."""
    sha, left = hashlib.sha256(), size_bytes
    yield _head(_blob_name(digest), size_bytes)
    try:
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                sha.update(chunk)
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
    except FileNotFoundError:
        left = size_bytes
    if left or f"sha256:{sha.hexdigest()}" != digest:
        raise StoreDamaged(f"{path}: is not what its name says")
    yield padding(size_bytes)


def archive_bytes(built: Built) -> int:
    """About how large the archive is, for a progress bar."""
    return built.size_bytes + len(built.layers) * BLOCK * 2
