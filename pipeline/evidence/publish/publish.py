"""An image from the store to a registry: what is missing first, its name last.

Blobs, then manifests by digest, then attachments, each read back and compared; only then does the
tag move. Killed anywhere before that, the tag names what it named before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.artifacts.attest.cosign import UNGATED_MEDIA, Content
from pipeline.artifacts.oci.document import Document, index_json, read_document
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.registry.upload import BlobResult, LocalBlob, push_blob
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import StoreDamaged
from pipeline.core.model import Frozen, canonical_json
from pipeline.evidence.publish.attachment import AttachedArtifact, Attachment, attach
from pipeline.evidence.publish.evidence import (
    CosignTags,
    EvidenceBundle,
    for_cosign,
    plan_naming,
    read_cosign_tags,
    statements_of,
)
from pipeline.evidence.publish.known import KnownRepository
from pipeline.images.assemble.image import Built
from pipeline.images.gate.state import GateState, Proof

EvidenceState = Literal["signed", "statements only", "none", "left out"]


@dataclass(frozen=True)
class ImageUpload:
    """Images by platform, the document that the tag will name, and all their blobs."""

    name: str
    images: dict[str, Document]
    root: Document
    blobs: tuple[LocalBlob, ...]

    @property
    def documents(self) -> list[Document]:
        """The documents in the order of a push: images before an index over them."""
        return list({d.digest: d for d in [*self.images.values(), self.root]}.values())


def plan_upload(store: Store, built: list[Built], *, index: bool = False) -> ImageUpload:
    """Read the images as they were built; only an index over platforms is new."""
    images = {b.platform: read_document(store.read_blob(b.digest)) for b in built}
    root = next(iter(images.values()))
    if index or len(images) > 1:
        # the same for the same images, whenever and wherever it is made
        entries = [
            image.descriptor.model_copy(update={"platform": platform})
            for platform, image in sorted(images.items())
        ]
        first, *others = [image.annotations.items() for image in images.values()]
        # an annotation of one platform only must not be in the index
        root = read_document(index_json(entries, dict(set(first).intersection(*others))))
    blobs = []
    for blob, image in {d.digest: (d, i) for i in images.values() for d in i.blobs}.values():
        path, part = store.blob_path(blob.digest), image.part(blob.digest)
        # found before the first byte is sent; the registry checks the digest
        if not path.is_file():
            raise StoreDamaged(f"{part} is missing: there is no {path}")
        if (size := path.stat().st_size) != blob.size_bytes:
            message = f"{path} has {size} bytes, not {blob.size_bytes}"
            raise StoreDamaged(f"{part} is damaged: {message}")
        blobs.append(LocalBlob(blob.digest, blob.size_bytes, path, part=part))
    return ImageUpload(built[0].name, images, root, tuple(blobs))


class Published(Frozen):
    """What a publish did."""

    image: str
    reference: str
    digest: str
    tag: str
    platforms: dict[str, str]
    gates: list[GateState]
    proved: list[Proof]
    ungated_reason: str | None
    blobs: dict[BlobResult, int]
    total_bytes: int
    sent_bytes: int
    attached: list[AttachedArtifact]
    attached_bytes: int  # evidence that had to be sent, besides `sent_bytes` of the image
    evidence: EvidenceState
    seconds: float
    dry_run: bool = False


@dataclass(frozen=True)
class PublishOrder:
    """What to publish, where, and how."""

    shipment: ImageUpload
    repository: Repository
    tag: str
    gates: list[GateState]
    proved: Sequence[Proof] = ()
    attachments: Sequence[Attachment] = ()
    ungated_reason: str | None = None
    bundle: EvidenceBundle | None = None  # none: publish without evidence, as asked
    jobs: int = 4

    @property
    def evidence(self) -> EvidenceState:
        if self.bundle is None:
            return "left out"
        if not any(self.bundle.envelopes.values()):
            return "none"
        return "signed" if self.bundle.signer else "statements only"


def push_with_evidence(store: Store, order: PublishOrder) -> Published:
    """Push what is missing, verify it, and give it its tag."""
    start, repository, shipment = time.monotonic(), order.repository, order.shipment
    known = KnownRepository(store, repository)
    with known.alone():
        missing = find_missing(order)
        elsewhere = known.elsewhere() if missing else {}
        total, blobs = sum(b.size_bytes for b in missing), shipment.blobs
        title = f"Sending {len(missing)} of {len(blobs)} blobs, {log.size(total)}, to {repository}"
        with log.step(title), log.progress("sent", total) as bar:
            results = repository.client.each(
                order.jobs,
                missing,
                lambda b: push_blob(repository, b, bar, elsewhere.get(b.digest, "")),
            )
        # also those that were there: other repositories can mount them from this one
        known.remember(blobs=[b.digest for b in blobs])
        # remembered before they are put: after a kill, clearing finds what no tag names
        known.remember(manifests=[d.digest for d in shipment.documents])
        for document in shipment.documents:
            repository.put_document(document.digest, document)
        # before the tag moves: a pull by tag then finds evidence with it
        attached = _attach(order)
        known.remember(manifests=[a.digest for a in attached])
        repository.put_document(order.tag, shipment.root)
    sent_bytes = sum(
        b.size_bytes for b, result in zip(missing, results, strict=True) if result == "sent"
    )
    return _published(order, results, sent_bytes, time.monotonic() - start, attached)


def rehearse(order: PublishOrder) -> Published:
    """Says what a publish would send; writes nothing."""
    start, missing = time.monotonic(), find_missing(order)
    size_bytes = sum(b.size_bytes for b in missing)
    done = _published(order, ["sent"] * len(missing), size_bytes, time.monotonic() - start)
    return done.model_copy(update={"dry_run": True})


def find_missing(order: PublishOrder) -> list[LocalBlob]:
    """The blobs that the registry lacks, the largest first, so that no large one comes last."""
    repository, blobs = order.repository, order.shipment.blobs
    found = repository.client.each(
        order.jobs, blobs, lambda b: repository.has_blob(b.digest, b.size_bytes)
    )
    missing = [blob for blob, is_found in zip(blobs, found, strict=True) if not is_found]
    return sorted(missing, key=lambda b: -b.size_bytes)


def _attach(order: PublishOrder) -> list[AttachedArtifact]:
    bundle, shipment = order.bundle or EvidenceBundle(), order.shipment
    repository, attachments = order.repository, list(order.attachments)
    for gates in order.gates if order.ungated_reason is not None else ():
        # a note that stays with an image whose gates did not pass
        if gates.state == "not passed":
            image, reason = shipment.images[gates.platform].digest, str(order.ungated_reason)
            note = canonical_json({"image": image, "gates": gates.message, "reason": reason})
            attachments.append(
                Attachment(
                    artifact_type=UNGATED_MEDIA,
                    layers=(Content(note, UNGATED_MEDIA),),
                    annotations={"sm120.ungated": reason},
                    platform=gates.platform,
                )
            )
    attachments += statements_of(bundle)
    if not attachments and bundle.signer is None:
        return []
    attached: list[AttachedArtifact] = []
    with log.step("Attaching evidence" if order.bundle else "Attaching files"):
        tags: dict[str, CosignTags] = {}
        # without a signer and statements, two requests for each image are saved
        if bundle.signer is not None or any(bundle.envelopes.values()):
            digests = [document.digest for document in shipment.documents]
            tags = {x: read_cosign_tags(repository, x, bundle.signer) for x in digests}
        # also of each platform: the name of one may have been signed again with newer evidence
        names = [name for each in tags.values() for name in each.names]
        naming = plan_naming(repository, shipment.root, order.tag, bundle, names)
        images = {image.digest for image in shipment.images.values()}
        for platform, subject in [(None, shipment.root), *shipment.images.items()]:
            chosen = [a for a in attachments if a.platform == platform]
            envelopes = bundle.envelopes.get(platform or "", ())
            # an image of one platform is the root as well: its name is signed once
            name = None if platform is None and subject.digest in images else naming
            chosen += for_cosign(subject, envelopes, name, tags.get(subject.digest, CosignTags()))
            if chosen:
                attached += attach(repository, subject, chosen)
    return attached


def _published(
    order: PublishOrder,
    results: Sequence[BlobResult],
    sent_bytes: int,
    seconds: float,
    attached: Sequence[AttachedArtifact] = (),
) -> Published:
    shipment = order.shipment
    is_forced = any(s.state == "not passed" for s in order.gates)
    known, mounted = len(shipment.blobs) - len(results), results.count("mounted")
    return Published(
        image=shipment.name,
        reference=f"{order.repository}@{shipment.root.digest}",
        digest=shipment.root.digest,
        tag=order.tag,
        platforms={platform: d.digest for platform, d in shipment.images.items()},
        gates=order.gates,
        proved=list(order.proved),
        ungated_reason=order.ungated_reason if is_forced else None,
        blobs={"there": known, "mounted": mounted, "sent": results.count("sent")},
        total_bytes=sum(b.size_bytes for b in shipment.blobs),
        sent_bytes=sent_bytes,
        attached=list(attached),
        attached_bytes=sum(a.sent_bytes for a in attached),
        evidence=order.evidence,
        seconds=round(seconds, 3),
    )
