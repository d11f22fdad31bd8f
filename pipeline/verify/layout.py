"""An OCI layout folder: the image in it, and the evidence that was pulled along."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.attest.strict import MAX_BYTES, as_model, read_json
from pipeline.errors import EvidenceBroken, RegistryBroken, UnknownImage
from pipeline.model import Frozen
from pipeline.oci.document import OCI_MANIFEST, Document, read_document
from pipeline.oci.document import Descriptor as Blob
from pipeline.verify.artifact import (
    Artifact,
    Descriptor,
    PlatformName,
    open_image,
    read_bounded,
    read_small,
    require_inside,
    require_platform,
)
from pipeline.verify.attached import Attached, sort_out

INDEX = "application/vnd.oci.image.index.v1+json"


class Index(Frozen):
    """A layout's list of images."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    media_type: Literal["application/vnd.oci.image.index.v1+json"] = Field(
        default="application/vnd.oci.image.index.v1+json", alias="mediaType"
    )
    manifests: list[Descriptor]
    annotations: dict[str, str] = {}


def open_layout(folder: Path, platform: str | None = None) -> Artifact:
    """An image in a layout folder; every blob is read and compared with its name."""
    index = _index(folder)
    # what was pulled along as evidence says its kind; an image has none
    listed = [d for d in _listed(folder, index) if d.artifact_type is None]
    images = [d for d in listed if d.media_type == OCI_MANIFEST]
    if platform is not None:
        images = [d for d in images if d.platform and _platform(d.platform) == platform]
    if len(images) != 1:
        others = {_platform(d.platform) for d in images if d.platform}
        raise UnknownImage(
            f"{folder}: holds {len(images)} images{f' for {platform}' if platform else ''}",
            "Choose one with --platform."
            if len(others) > 1
            else "Name a layout that holds one image for the platform.",
        )
    (chosen,) = images
    found = open_image(folder / "blobs" / "sha256", chosen.digest, folder.name, chosen.size)
    require_platform(found, _platform(chosen.platform) if chosen.platform else None)
    return found


def _listed(folder: Path, index: Index) -> list[Descriptor]:
    """What an index names, also through an index of platforms, but no deeper."""
    found: list[Descriptor] = []
    for each in index.manifests:
        if each.media_type == INDEX:
            data = read_small(folder / "blobs" / "sha256", each.digest, each.size)
            found += _read_index(data, f"{folder.name}: index of platforms").manifests
        else:
            found.append(each)
    return found


def attached_in(folder: Path, digest: str) -> Attached:
    """Evidence that was pulled into a layout along with the image."""
    blobs = folder / "blobs" / "sha256"
    index = _index(folder)
    documents = []
    strays = []
    for entry in index.manifests:
        if entry.artifact_type is None or entry.media_type != OCI_MANIFEST:
            continue
        document = _document(read_small(blobs, entry.digest, entry.size))
        if document.subject is None:
            strays.append(f"{entry.digest} is listed, but is about no image")
        else:
            documents.append(document)

    def read(blob: Blob) -> bytes:
        return read_small(blobs, blob.digest, blob.size_bytes, MAX_BYTES)

    found = sort_out(digest, documents, read)
    found.passed_over[:0] = strays
    return found


def _document(data: bytes) -> Document:
    try:
        return read_document(data)
    except RegistryBroken as error:
        raise EvidenceBroken(str(error)) from error


def _read_index(data: bytes, what: str) -> Index:
    return as_model(Index, read_json(data, what), what)


def _index(folder: Path) -> Index:
    require_inside(folder, folder / "index.json")
    return _read_index(read_bounded(folder / "index.json"), f"{folder.name}/index.json")


def _platform(found: PlatformName) -> str:
    return f"{found.os}/{found.architecture}"
