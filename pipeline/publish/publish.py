"""An image from the store to a registry: what is missing first, its name last.

Blobs, then manifests by digest, then what is attached; then everything is read back and compared;
only then does the tag move. Killed anywhere before that, the tag is what it was.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline import log
from pipeline.attest.cosign import UNGATED_MEDIA
from pipeline.errors import RegistryBroken
from pipeline.model import Frozen, canonical_json
from pipeline.oci.document import Document
from pipeline.publish import known
from pipeline.publish.attachment import Attached, Attachment, Content, attach
from pipeline.publish.evidence import EvidenceBundle, for_cosign, statements_of
from pipeline.publish.gates import GateState
from pipeline.publish.naming import Naming, plan_naming
from pipeline.publish.shipment import Shipment
from pipeline.registry.local import LocalBlob
from pipeline.registry.parallel import each
from pipeline.registry.repository import Repository
from pipeline.registry.upload import Way, has_blob, push_blob
from pipeline.store.store import Store

UNGATED = UNGATED_MEDIA


EvidenceState = Literal["signed", "statements only", "none", "left out"]


class Published(Frozen):
    """What a publish did."""

    image: str
    reference: str
    digest: str
    tag: str
    platforms: dict[str, str]
    gates: list[GateState]
    ungated_reason: str | None
    blobs: dict[Way, int]
    total_bytes: int
    sent_bytes: int
    attached: list[Attached]
    attached_bytes: int  # evidence that had to be sent, besides `sent_bytes` of the image
    evidence: EvidenceState
    seconds: float
    dry_run: bool = False


@dataclass(frozen=True)
class Order:
    """What to publish, where, and how."""

    shipment: Shipment
    repository: Repository
    tag: str
    gates: list[GateState]
    attachments: Sequence[Attachment] = ()
    ungated_reason: str | None = None
    bundle: EvidenceBundle | None = None  # none: published bare, as was asked
    jobs: int = 4


def publish(store: Store, order: Order) -> Published:
    """Push what is missing, verify it, and give it its tag."""
    start, repository, shipment = time.monotonic(), order.repository, order.shipment
    registry = repository.client.name
    with known.alone_in(store, registry, repository.name):
        missing, there = find_missing(order)
        ways = _push_blobs(store, order, missing)
        digests = [d.digest for d in shipment.documents]
        known.remember(store, registry, repository.name, manifests=digests)
        for document in shipment.documents:
            repository.put_manifest(document.digest, document.data, document.media_type)
        attached = _attach(order)
        known.remember(store, registry, repository.name, manifests=[a.digest for a in attached])
        for document in shipment.documents:
            _require_back(repository, document, document.digest)
        # of a digest exactly those bytes come back, or an error
        each(repository.client, order.jobs, [a.digest for a in attached], repository.manifest)
        repository.put_manifest(order.tag, shipment.root.data, shipment.root.media_type)
        _require_back(repository, shipment.root, order.tag)
    sent = {b.digest for b, way in zip(missing, ways, strict=True) if way == "sent"}
    counts: dict[Way, int] = {"there": len(there)}
    counts |= {"mounted": ways.count("mounted"), "sent": ways.count("sent")}
    return _published(
        order,
        attached,
        counts,
        sum(b.size_bytes for b in missing if b.digest in sent),
        time.monotonic() - start,
    )


def rehearse(order: Order) -> Published:
    """What a publish would send; nothing is written."""
    start = time.monotonic()
    missing, there = find_missing(order)
    counts: dict[Way, int] = {"there": len(there), "mounted": 0, "sent": len(missing)}
    size_bytes = sum(b.size_bytes for b in missing)
    found = _published(order, [], counts, size_bytes, time.monotonic() - start)
    return found.model_copy(update={"dry_run": True})


def find_missing(order: Order) -> tuple[list[LocalBlob], list[LocalBlob]]:
    """The blobs that the registry lacks, and those that it has."""
    repository = order.repository

    def look(blob: LocalBlob) -> bool:
        return has_blob(repository, blob.digest, blob.size_bytes)

    found = each(repository.client, order.jobs, order.shipment.blobs, look)
    pairs = list(zip(order.shipment.blobs, found, strict=True))
    # the largest first, so that the last one to end is not the longest
    missing = sorted((b for b, has in pairs if not has), key=lambda b: -b.size_bytes)
    return missing, [b for b, has in pairs if has]


def _push_blobs(store: Store, order: Order, missing: list[LocalBlob]) -> list[Way]:
    repository = order.repository
    registry = repository.client.name
    elsewhere = known.neighbours(store, registry, repository.name) if missing else {}
    total = sum(b.size_bytes for b in missing)
    title = f"Sending {len(missing)} of {len(order.shipment.blobs)} blobs, {log.size(total)}"
    with log.step(f"{title}, to {repository}"), log.progress("sent", total) as bar:

        def send(blob: LocalBlob) -> Way:
            return push_blob(repository, blob, bar, elsewhere.get(blob.digest, ""))

        ways = each(repository.client, order.jobs, missing, send)
    known.remember(store, registry, repository.name, blobs=[b.digest for b in order.shipment.blobs])
    return ways


def _attach(order: Order) -> list[Attached]:
    bundle = order.bundle or EvidenceBundle()
    attachments = [*order.attachments, *_ungated(order), *statements_of(bundle)]
    if not attachments and bundle.signer is None:
        return []
    with log.step("Attaching evidence" if order.bundle else "Attaching what was given"):
        return _attach_all(order, bundle, attachments)


def _attach_all(
    order: Order, bundle: EvidenceBundle, attachments: Sequence[Attachment]
) -> list[Attached]:
    found: list[Attached] = []
    subjects: list[tuple[str | None, Document]] = [(None, order.shipment.root)]
    naming = _naming(order, bundle)
    images = {image.digest for image in order.shipment.images.values()}
    for platform, subject in [*subjects, *order.shipment.images.items()]:
        chosen = [a for a in attachments if a.platform == platform]
        known = bundle.envelopes.get(platform or "", ())
        # an image of one platform is the root as well: its name is signed once, with its evidence
        name = None if platform is None and subject.digest in images else naming
        chosen += for_cosign(order.repository, subject, known, name)
        if chosen:
            found += attach(order.repository, subject, chosen)
    return found


def _naming(order: Order, bundle: EvidenceBundle) -> Naming | None:
    if bundle.signer is None:
        return None
    root = order.shipment.root.digest
    return plan_naming(order.repository, root, order.tag, bundle.signer, bundle.now)


def _evidence(order: Order) -> EvidenceState:
    if order.bundle is None:
        return "left out"
    if not any(order.bundle.envelopes.values()):
        return "none"
    return "signed" if order.bundle.signer else "statements only"


def _ungated(order: Order) -> list[Attachment]:
    """That an image was published although its gates did not pass stays with the image."""
    reason = order.ungated_reason
    if reason is None:
        return []
    found = []
    for state in order.gates:
        if state.state != "not passed":
            continue
        digest = order.shipment.images[state.platform].digest
        data = {"image": digest, "gates": state.message, "reason": reason}
        found.append(
            Attachment(
                artifact_type=UNGATED,
                layers=(Content(media_type=UNGATED, data=canonical_json(data)),),
                annotations={"sm120.ungated": reason},
                platform=state.platform,
            )
        )
    return found


def _require_back(repository: Repository, document: Document, name: str) -> None:
    """The registry gives back what it was given, byte for byte."""
    back = repository.manifest(name)
    if back.data != document.data:
        raise RegistryBroken(f"{repository}: {name} came back as {back.digest}")


def _published(
    order: Order, attached: list[Attached], counts: dict[Way, int], sent: int, seconds: float
) -> Published:
    shipment = order.shipment
    forced = any(s.state == "not passed" for s in order.gates)
    return Published(
        image=shipment.name,
        reference=f"{order.repository}@{shipment.root.digest}",
        digest=shipment.root.digest,
        tag=order.tag,
        platforms={platform: d.digest for platform, d in shipment.images.items()},
        gates=order.gates,
        ungated_reason=order.ungated_reason if forced else None,
        blobs=counts,
        total_bytes=shipment.size_bytes,
        sent_bytes=sent,
        attached=attached,
        attached_bytes=sum(a.sent_bytes for a in attached),
        evidence=_evidence(order),
        seconds=round(seconds, 3),
    )
