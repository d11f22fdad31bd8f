"""An image in a registry and its attached evidence. Only this registry is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from pipeline.artifacts.attest.cosign import SIGNATURE_MEDIA
from pipeline.artifacts.attest.strict import MAX_BYTES
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.oci.document import MOST_MANIFEST_BYTES, Document
from pipeline.artifacts.oci.reference import ImageReference
from pipeline.artifacts.registry.pull import plan_pull, receive_blob
from pipeline.artifacts.registry.referrers import everything_listed, fallback_tag
from pipeline.artifacts.registry.repository import Repository
from pipeline.core import log
from pipeline.core.errors import EvidenceBroken, NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.evidence.verify.artifact import (
    Artifact,
    make_artifact,
    require_manifest,
    require_platform,
)
from pipeline.evidence.verify.evidence import MOST_FILES, AttachedEvidence, read_attached
from pipeline.evidence.verify.naming import TrustedName, believed_names

# https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
_SIGNATURE_TAG = re.compile(r"sha256-([0-9a-f]{64})\.sig")
# Searched for the image that a tag was signed for, if the tag now names another one.
_MOST_OTHERS = 500


@dataclass(frozen=True)
class RemoteImage:
    """What a reference names: one image, or an index over several."""

    repository: Repository
    root: Document
    images: tuple[Document, ...]
    tag: str | None  # where one was named
    tag_digest: str | None

    @property
    def reference(self) -> str:
        return f"{self.repository}:{self.tag}" if self.tag else str(self.repository)


def open_remote(
    repository: Repository, reference: ImageReference, platform: str | None
) -> RemoteImage:
    """Resolve a reference; for a tag with a digest, read both and compare them later."""
    at_tag = repository.manifest(reference.tag) if reference.tag else None
    root = repository.manifest(reference.digest) if reference.digest else at_tag
    if root is None:
        raise NotInRegistry(f"{reference}: names neither a tag nor a digest")
    # the same choice of platform as `registry pull` makes
    wanted = plan_pull(repository, root, platform)
    images = tuple(d for d in wanted.documents if d.kind == "manifest")
    if not images:
        raise EvidenceBroken(f"{reference}: is an empty index")
    # a tag that names another image than the given digest is reported as moved
    return RemoteImage(repository, root, images, reference.tag, at_tag.digest if at_tag else None)


def open_remote_image(remote: RemoteImage, image: Document, *, deep: bool, jobs: int) -> Artifact:
    """Read an image's manifest and config; look for its layers or, if `deep`, read them."""
    repository = remote.repository
    title = str(repository)
    require_manifest(image, title)
    config = repository.read_blob(image.blobs[0], MOST_MANIFEST_BYTES)
    artifact = make_artifact(title, image, config)
    listed = (d.platform for d in remote.root.manifests if d.digest == image.digest)
    require_platform(artifact, next(listed, None))
    # an image may have one layer twice
    layers = list({d.digest: d for d in image.layers}.values())
    if not deep:
        found = repository.client.each(
            jobs, layers, lambda b: repository.has_blob(b.digest, b.size_bytes)
        )
        for missing in (x for x, is_found in zip(layers, found, strict=True) if not is_found):
            message = f"its layer {missing.digest} is missing from the registry"
            raise EvidenceBroken(f"{title}: {message}")
        return artifact
    total = sum(b.size_bytes for b in layers)
    with (
        log.step(f"Reading {log.count(len(layers), 'layer')}, {log.size(total)}"),
        log.progress("read", total) as bar,
    ):
        repository.client.each(jobs, layers, lambda b: receive_blob(repository, b, None, bar))
    return artifact


def attached_to(remote: RemoteImage, image: Document, jobs: int) -> AttachedEvidence:
    """Collect evidence by referrers, fallback tag and cosign's tags; name what does not belong."""
    repository, strays = remote.repository, []
    documents: list[Document] = []
    listed = everything_listed(repository, image.digest)
    if len(listed) > MOST_FILES:
        raise RecordInvalid(f"{repository}: lists {len(listed)} attachments for {image.digest}")
    read = repository.client.each(jobs, listed, lambda d: repository.find_manifest(d.digest))
    for entry, document in zip(listed, read, strict=True):
        if document is None:
            strays.append(f"{entry.digest} is listed, but missing")
        elif document.subject is None:
            strays.append(f"{document.digest} is listed, but has no subject")
        else:
            documents.append(document)
    # older cosign, and registries without the referrers API
    for suffix in ("sig", "att"):
        document = repository.find_manifest(f"{fallback_tag(image.digest)}.{suffix}")
        documents += [document] if document else []
    attached = read_attached(image.digest, documents, lambda d: repository.read_blob(d, MAX_BYTES))
    attached.skipped[:0] = strays
    return attached


def named_elsewhere(
    remote: RemoteImage, trust: Trust | None, now: datetime, jobs: int
) -> list[TrustedName]:
    """Names that trusted keys gave to other images of this repository."""
    repository, own = remote.repository, remote.root.digest
    # registries list tags, not who signed what
    tags = [t for t in repository.tags() if _SIGNATURE_TAG.fullmatch(t)]
    tags = [t for t in tags if t != f"{fallback_tag(own)}.sig"][:_MOST_OTHERS]

    def names(tag: str) -> list[TrustedName]:
        digest = "sha256:" + tag.removeprefix("sha256-").removesuffix(".sig")
        try:
            document = repository.find_manifest(tag)
            layers = document.layers if document else ()
            if document is None or all(x.media_type != SIGNATURE_MEDIA for x in layers):
                return []
            found = read_attached(digest, [document], lambda d: repository.read_blob(d, MAX_BYTES))
        except (RegistryBroken, EvidenceBroken, RecordInvalid):
            # who can push can also delete it: an unreadable signature proves as little as none
            return []
        believed, _ = believed_names(found.signatures, trust, now)
        return [n for n in believed if n.digest == digest]

    return [n for batch in repository.client.each(jobs, tags, names) for n in batch]
