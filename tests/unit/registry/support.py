"""A small image and a repository behind a door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.oci.document import OCI_MANIFEST, Document, read_document
from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import BlobResult, LocalBlob, push_blob
from pipeline.core.log import NoBar
from tests.testbed.oci_door import Door
from tests.testbed.tiny_registry import TinyRegistry, digest_of

NAME = "team/app"
EMPTY_INDEX: dict[str, Any] = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.index.v1+json",
    "manifests": [],
}


def repository_at(door: Door, name: str = NAME, **access: Any) -> Repository:
    """A repository, with a client that does not wait long."""
    reference = parse_reference(f"{door.host_port}/{name}")
    return Repository(RegistryClient(reference, Access(first_wait_s=0.001, **access)), name)


def keep_login(monkeypatch: pytest.MonkeyPatch, folder: Path, config: dict[str, Any]) -> None:
    """What `docker login` leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def blob_of(data: bytes) -> LocalBlob:
    return LocalBlob(digest_of(data), len(data), data=data)


def push(repository: Repository, data: bytes, mount_from: str = "") -> BlobResult:
    return push_blob(repository, blob_of(data), NoBar(), mount_from)


def manifest_json(config: bytes, *layers: bytes, **more: Any) -> dict[str, Any]:
    """An image manifest of plain bytes."""
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": described(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [described(x, "application/vnd.oci.image.layer.v1.tar+gzip") for x in layers],
        **more,
    }


def described(data: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest_of(data), "size": len(data)}


def put(tiny: TinyRegistry, body: dict[str, Any], tag: str = "", name: str = NAME) -> Document:
    """A manifest in a registry, without asking it."""
    data = json.dumps(body).encode()
    document = read_document(data)
    tiny.manifests[name, document.digest] = document.media_type, data
    if tag:
        tiny.tags[name, tag] = document.digest
    return document


def put_image(tiny: TinyRegistry, tag: str, *layers: bytes, **more: Any) -> Document:
    """A whole image in a registry."""
    config = f"config of {tag}".encode()
    for data in (config, *layers):
        tiny.blobs[NAME, digest_of(data)] = data
    return put(tiny, manifest_json(config, *layers, **more), tag)


def index_json(*parts: tuple[Document, str]) -> dict[str, Any]:
    """An index over images by platform."""
    entries = [
        {
            "mediaType": d.media_type,
            "digest": d.digest,
            "size": len(d.data),
            "platform": dict(zip(("os", "architecture"), p.split("/"), strict=True)),
        }
        for d, p in parts
    ]
    return {**EMPTY_INDEX, "manifests": entries}
