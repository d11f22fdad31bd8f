"""Attachments of a published image: statements, an SBOM, signatures, or any file.

Each becomes an OCI 1.1 artifact whose subject is the image. It holds no time of its own, so that
attaching the same thing twice changes nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.artifacts.attest.cosign import Content
from pipeline.artifacts.oci.document import (
    OCI_EMPTY,
    OCI_MANIFEST,
    TITLE,
    Descriptor,
    Document,
    descriptor_json,
    read_document,
)
from pipeline.artifacts.registry.referrers import artifact_kind, list_in_fallback_tag
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import LocalBlob, push_blob
from pipeline.core.errors import AttachmentInvalid
from pipeline.core.files import read_at_most
from pipeline.core.log import NoBar
from pipeline.core.model import Frozen, canonical_json, sha256_of

# RFC 6838 4.2, in small letters
MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
# held in memory while it is pushed; larger files are no evidence
MOST_BYTES = 64 << 20
PREDICATE_NOTE = "in-toto.io/predicate-type"


def described(content: Content) -> Descriptor:
    """How a manifest names a blob."""
    return Descriptor(
        media_type=content.media_type,
        digest=sha256_of(content.data),
        size_bytes=len(content.data),
        annotations=content.annotations,
    )


class Attachment(Frozen):
    """Something that belongs to an image, or to one platform of it.

    `tag` also puts it under a tag of its own, for tools that look there (cosign: `sha256-….sig`);
    `kept` lists layers that the repository already has.
    """

    artifact_type: str | None
    layers: tuple[Content, ...]
    kept: tuple[Descriptor, ...] = ()
    config: Content | None = None
    annotations: dict[str, str] = {}
    platform: str | None = None
    tag: str | None = None
    is_referrer: bool = True

    @property
    def contents(self) -> tuple[Content, ...]:
        """All blobs that must be pushed before the manifest."""
        # image-spec: an artifact without content has the empty JSON object as its layer
        layers = self.layers if self.layers or self.kept else (EMPTY,)
        return (self.config or EMPTY, *layers)

    def manifest(self, subject: Document | None = None) -> Document:
        """The artifact's manifest; one without a subject stands for itself."""
        config, *layers = map(described, self.contents)
        written: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": descriptor_json(config),
            "layers": [descriptor_json(x) for x in (*self.kept, *layers)],
        }
        if self.is_referrer and subject:
            written["subject"] = descriptor_json(subject.descriptor)
        if self.artifact_type:
            written["artifactType"] = self.artifact_type
        if self.annotations:
            written["annotations"] = self.annotations
        return read_document(canonical_json(written))


EMPTY = Content(b"{}", OCI_EMPTY)


class AttachedArtifact(Frozen):
    """The result of attaching one artifact."""

    digest: str
    artifact_type: str
    subject: str
    found_by: str
    predicate_type: str | None = None  # of a statement
    sent_bytes: int = 0  # of its blobs; those that were there are not resent


def file_attachment(text: str, platforms: list[str]) -> Attachment:
    """Parses `[PLATFORM=]FILE:TYPE`."""
    platform, equals, rest = text.partition("=")
    # a file name may hold an equals sign
    if not equals or platform not in platforms:
        platform, rest = "", text
    name, _, kind = rest.rpartition(":")
    if not name or not MEDIA_TYPE.fullmatch(kind):
        raise AttachmentInvalid(f"{text}: does not name a media type")
    path = Path(name)
    if not path.is_file():
        raise AttachmentInvalid(f"{path}: no such file")
    data = read_at_most(path, MOST_BYTES)
    if data is None:
        raise AttachmentInvalid(f"{path}: is larger than {MOST_BYTES >> 20} MiB")
    content = Content(data, kind, {TITLE: path.name})
    return Attachment(artifact_type=kind, layers=(content,), platform=platform or None)


def attach(
    repository: Repository, subject: Document, attachments: list[Attachment]
) -> list[AttachedArtifact]:
    """Push artifacts for one image and list them as its referrers."""
    attached, unlisted = [], []
    for attachment in attachments:
        document = attachment.manifest(subject)
        sent = 0
        for content in attachment.contents:
            digest, size_bytes = sha256_of(content.data), len(content.data)
            if not repository.has_blob(digest, size_bytes):
                push_blob(repository, LocalBlob(digest, size_bytes, data=content.data), NoBar())
                sent += size_bytes
        answer = repository.put_document(document.digest, document)
        if attachment.tag:
            repository.put_document(attachment.tag, document)
        how, kind = f"tag {attachment.tag}", artifact_kind(document)
        if attachment.is_referrer:
            # a registry with the referrers API confirms it with this header
            # https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-manifests-with-subject
            is_listed = answer.header("OCI-Subject") == subject.digest
            how = "referrers API" if is_listed else "fallback tag"
            if not is_listed:
                notes = {"artifact_type": kind, "annotations": document.annotations}
                unlisted.append(document.descriptor.model_copy(update=notes))
        attached.append(
            AttachedArtifact(
                digest=document.digest,
                artifact_type=kind,
                subject=subject.digest,
                found_by=how,
                predicate_type=document.annotations.get(PREDICATE_NOTE),
                sent_bytes=sent,
            )
        )
    if unlisted:
        # all at once: each change of that tag reads and writes a whole index
        list_in_fallback_tag(repository, subject.digest, unlisted)
    return attached
