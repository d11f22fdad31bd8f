"""Manifests and indexes of any author, read strictly.

The content of a document decides its kind: the media type that a server claims for it must
agree, and a document that could be read as both is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pipeline.artifacts.oci.reference import DIGEST
from pipeline.core import foreign_json
from pipeline.core.errors import RegistryBroken
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.core.net.address import without_controls

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
# The config of an artifact that needs none.
OCI_EMPTY = "application/vnd.oci.empty.v1+json"
LayerType = Literal[
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.oci.image.layer.v1.tar",
]
GZIP_LAYER: LayerType = "application/vnd.oci.image.layer.v1.tar+gzip"
# these two only ever of a foreign base: we write gzip, which every Docker reads
ZSTD_LAYER: LayerType = "application/vnd.oci.image.layer.v1.tar+zstd"
PLAIN_LAYER: LayerType = "application/vnd.oci.image.layer.v1.tar"
# Docker Hub still serves many images by these names; their layers are the same.
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_GZIP_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
DOCKER_ZSTD_LAYER = "application/vnd.docker.image.rootfs.diff.tar.zstd"
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
# What a person calls an image or a layer.
TITLE = "org.opencontainers.image.title"
_MOST_DEPTH = 20  # documents of the specification have some six levels
_MOST_ENTRIES = 1000  # an image has 127 layers at most, an index some ten platforms


class Descriptor(Frozen):
    """How one document names another: by digest, size and type."""

    media_type: str
    digest: Digest
    size_bytes: int
    artifact_type: str | None = None
    platform: str | None = None
    annotations: dict[str, str] = {}


class Document(Frozen):
    """A manifest or an index: its very bytes, and what they name."""

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
        parts = [*([self.config] if self.config else []), *self.layers]
        return tuple({d.digest: d for d in parts}.values())

    def part(self, digest: str) -> str:
        """What a blob is in this image, for a person who has to repair it."""
        name = "config" if self.config and digest == self.config.digest else "manifest"
        for number, layer in enumerate(self.layers, start=1):
            if name == "manifest" and layer.digest == digest:
                title = without_controls(layer.annotations.get(TITLE, ""))
                name = f"layer {number} of {len(self.layers)}{f' ({title})' if title else ''}"
        image = without_controls(self.annotations.get(TITLE, ""))
        return f"{name} of {image}" if image else name


def read_document(data: bytes, claimed_type: str = "") -> Document:
    """A manifest or index, or an error that names what is wrong with it."""
    digest, claimed = sha256_of(data), claimed_type.partition(";")[0].strip().lower()
    value = read_document_json(data, f"the manifest {digest}")
    try:
        if not isinstance(value, dict):
            raise ValueError("is not a JSON object")
        if value.get("schemaVersion") == 1:
            message = "uses Docker's schema version 1, which is no longer supported; push it again"
            raise ValueError(message)
        if value.get("schemaVersion") != 2:
            raise ValueError("has an unknown schema version")
        # by its content: a document need not state its media type
        kind: Literal["manifest", "index"] = "index" if "manifests" in value else "manifest"
        # a reader that goes by the header and one that goes by the content would see two images:
        # https://github.com/opencontainers/distribution-spec/security/advisories/GHSA-mc8v-mgrf-8f4m
        if kind == "index" and {"layers", "config", "fsLayers"} & value.keys():
            raise ValueError("could be read as a manifest and as an index")
        usual = OCI_INDEX if kind == "index" else OCI_MANIFEST
        media_type = value.get("mediaType") or claimed or usual
        if not isinstance(media_type, str) or KINDS.get(media_type) != kind:
            raise ValueError(f"is a {kind} that calls itself {str(media_type)[:80]!r}")
        if claimed in KINDS and claimed != media_type:
            raise ValueError(f"is sent as {claimed} and calls itself {media_type}")
        if kind == "manifest" and "config" not in value:
            raise ValueError("has no config")
        config, subject = value.get("config"), value.get("subject")
        return Document(
            data=data,
            digest=digest,
            media_type=media_type,
            kind=kind,
            config=read_descriptor(config) if kind == "manifest" else None,
            layers=_descriptors(value.get("layers") or []),
            manifests=_descriptors(value.get("manifests") or []),
            subject=read_descriptor(subject) if subject is not None else None,
            artifact_type=_text(value.get("artifactType")),
            annotations=_annotations(value.get("annotations")),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise RegistryBroken(f"the manifest {digest}: {error}") from error


def _descriptors(value: Any) -> tuple[Descriptor, ...]:
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise ValueError("its list of parts is not a list, or is too long")
    return tuple(read_descriptor(x) for x in value)


def read_descriptor(value: Any) -> Descriptor:
    """One entry; fields that we do not know are dropped."""
    if not isinstance(value, dict):
        raise ValueError("names a part that is not a JSON object")
    digest, size, kind = value.get("digest"), value.get("size"), value.get("mediaType")
    if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
        raise ValueError(f"names a part by {str(digest)[:80]!r}, which is not a sha256 digest")
    # for Python True is a 1
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"names {digest} with {str(size)[:20]!r} bytes")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"names {digest} without a media type")
    place, platform = value.get("platform"), None
    if isinstance(place, dict):
        # `os/architecture`, with the variant where there is one
        parts = [place.get(name) for name in ("os", "architecture", "variant")]
        platform = "/".join(str(p) for p in parts if p) or None
    return Descriptor(
        media_type=kind,
        digest=digest,
        size_bytes=size,
        artifact_type=_text(value.get("artifactType")),
        platform=platform,
        annotations=_annotations(value.get("annotations")),
    )


def as_descriptor(value: Any) -> Descriptor:
    """A descriptor as it is, or read from JSON."""
    return value if isinstance(value, Descriptor) else read_descriptor(value)


def _annotations(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("its annotations are not strings")
    return dict(value)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def descriptor_json(descriptor: Descriptor) -> dict[str, Any]:
    """A descriptor as documents write it."""
    written: dict[str, Any] = {"mediaType": descriptor.media_type, "digest": descriptor.digest}
    names, parts = ("os", "architecture", "variant"), (descriptor.platform or "").split("/")
    optional = {
        "artifactType": descriptor.artifact_type,
        "platform": dict(zip(names, parts, strict=False)) if descriptor.platform else None,
        "annotations": descriptor.annotations,
    }
    written["size"] = descriptor.size_bytes
    return written | {name: value for name, value in optional.items() if value}


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


def read_document_json(data: bytes, name: str) -> Any:
    """JSON without doubled names, endless depth or numbers that are none."""
    try:
        return foreign_json.read_json(data, most_bytes=MOST_MANIFEST_BYTES, most_depth=_MOST_DEPTH)
    except foreign_json.JsonInvalid as error:
        raise RegistryBroken(f"{name}: is not acceptable JSON: {error}") from error
