"""Manifests and indexes as strangers write them, read strictly.

What a document is, is decided by what it holds: the media type that someone claims for it must
agree, and a document that could be read as both is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pipeline import foreign_json
from pipeline.errors import RegistryBroken
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.oci.reference import DIGEST

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
LayerType = Literal[
    "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.oci.image.layer.v1.tar"
]
GZIP_LAYER: LayerType = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER: LayerType = "application/vnd.oci.image.layer.v1.tar"  # only ever of a foreign base
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_GZIP_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
DOCKER_PLAIN_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
ACCEPT = ", ".join((OCI_MANIFEST, OCI_INDEX, DOCKER_MANIFEST, DOCKER_INDEX))
KINDS: dict[str, Literal["manifest", "index"]] = {
    OCI_MANIFEST: "manifest",
    DOCKER_MANIFEST: "manifest",
    OCI_INDEX: "index",
    DOCKER_INDEX: "index",
}
# The size that every registry is recommended to take:
# https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-manifests
MOST_MANIFEST_BYTES = 4 << 20
_MOST_DEPTH = 20
_MOST_ENTRIES = 1000


class Descriptor(Frozen):
    """What one document says of another: its digest, its size, what it is."""

    media_type: str
    digest: Digest
    size_bytes: int
    artifact_type: str | None = None
    platform: str | None = None
    annotations: dict[str, str] = {}


class Document(Frozen):
    """A manifest or an index: its very bytes, and what they say."""

    data: bytes
    digest: str
    media_type: str
    kind: Literal["manifest", "index"]
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    manifests: tuple[Descriptor, ...] = ()
    subject: Descriptor | None = None
    artifact_type: str | None = None
    annotations: dict[str, str] = {}

    @property
    def descriptor(self) -> Descriptor:
        """How another document names this one."""
        return Descriptor(media_type=self.media_type, digest=self.digest, size_bytes=len(self.data))

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        """Config and layers, each once."""
        found = [*([self.config] if self.config else []), *self.layers]
        return tuple({d.digest: d for d in found}.values())


def read_document(data: bytes, claimed_type: str = "") -> Document:
    """A manifest or index, or an error that says what is wrong with it."""
    digest = sha256_of(data)
    found = read_json(data, f"the manifest {digest}")
    try:
        return _document(data, digest, found, claimed_type.partition(";")[0].strip().lower())
    except (ValueError, TypeError, AttributeError) as error:
        raise RegistryBroken(f"the manifest {digest}: {error}") from error


def _document(data: bytes, digest: str, found: Any, claimed: str) -> Document:
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    if found.get("schemaVersion") == 1:
        raise ValueError("is of Docker's schema version 1, which is no longer read; push it anew")
    if found.get("schemaVersion") != 2:
        raise ValueError("is of no schema version that is known here")
    kind: Literal["manifest", "index"] = "index" if "manifests" in found else "manifest"
    if kind == "index" and ("layers" in found or "config" in found or "fsLayers" in found):
        raise ValueError("could be read as a manifest and as an index")
    said = found.get("mediaType") or claimed or (OCI_INDEX if kind == "index" else OCI_MANIFEST)
    if not isinstance(said, str) or KINDS.get(said) != kind:
        raise ValueError(f"is a {kind} that calls itself {str(said)[:80]!r}")
    if claimed in KINDS and claimed != said:
        raise ValueError(f"is sent as {claimed} and calls itself {said}")
    subject = found.get("subject")
    return Document(
        data=data,
        digest=digest,
        media_type=said,
        kind=kind,
        config=read_descriptor(found["config"]) if _has(found, "config", kind) else None,
        layers=_descriptors(found.get("layers") or []),
        manifests=_descriptors(found.get("manifests") or []),
        subject=read_descriptor(subject) if subject is not None else None,
        artifact_type=_text(found.get("artifactType")),
        annotations=_annotations(found.get("annotations")),
    )


def _has(found: dict[str, Any], name: str, kind: str) -> bool:
    if kind == "manifest" and name not in found:
        raise ValueError(f"has no {name}")
    return name in found


def _descriptors(found: Any) -> tuple[Descriptor, ...]:
    if not isinstance(found, list) or len(found) > _MOST_ENTRIES:
        raise ValueError("its list of parts is no list, or too long")
    return tuple(read_descriptor(x) for x in found)


def read_descriptor(found: Any) -> Descriptor:
    """One entry; only what is known of it is kept."""
    if not isinstance(found, dict):
        raise ValueError("names a part that is no JSON object")
    digest, size, kind = found.get("digest"), found.get("size"), found.get("mediaType")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError(f"names a part by {str(digest)[:80]!r}, which is no sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"names {digest} with {str(size)[:20]!r} bytes")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"names {digest} without a media type")
    return Descriptor(
        media_type=kind,
        digest=digest,
        size_bytes=size,
        artifact_type=_text(found.get("artifactType")),
        platform=_platform(found.get("platform")),
        annotations=_annotations(found.get("annotations")),
    )


def as_descriptor(value: Any) -> Descriptor:
    """A descriptor as it is, or read from JSON."""
    return value if isinstance(value, Descriptor) else read_descriptor(value)


def _platform(found: Any) -> str | None:
    """`os/architecture`, with the variant where there is one."""
    if not isinstance(found, dict):
        return None
    parts = [found.get("os"), found.get("architecture"), found.get("variant")]
    return "/".join(str(p) for p in parts if p) or None


def _annotations(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise ValueError("its annotations are no texts by name")
    return dict(found)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def descriptor_json(found: Descriptor) -> dict[str, Any]:
    """A descriptor as documents write it."""
    written: dict[str, Any] = {
        "mediaType": found.media_type,
        "digest": found.digest,
        "size": found.size_bytes,
    }
    if found.artifact_type:
        written["artifactType"] = found.artifact_type
    if found.platform:
        names = ("os", "architecture", "variant")
        written["platform"] = dict(zip(names, found.platform.split("/"), strict=False))
    if found.annotations:
        written["annotations"] = found.annotations
    return written


def index_json(
    entries: Iterable[Descriptor], annotations: Mapping[str, str] | None = None
) -> bytes:
    """An index over documents; the same bytes for the same entries."""
    index: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor_json(entry) for entry in entries],
    }
    return canonical_json(index if annotations is None else {**index, "annotations": annotations})


def read_json(data: bytes, name: str) -> Any:
    """JSON without doubled names, endless depth or numbers that are none."""
    try:
        return foreign_json.read_json(data, most_bytes=MOST_MANIFEST_BYTES, most_depth=_MOST_DEPTH)
    except foreign_json.JsonInvalid as error:
        raise RegistryBroken(f"{name}: is no JSON that can be trusted: {error}") from error
