"""An image's evidence on its way to a registry, in the forms that others look for.

Each signed statement and each bill of materials becomes a referrer of its own. cosign looks under
tags instead: all statements stand together under `sha256-<hex>.att`, signatures of the digest
under `sha256-<hex>.sig`. What others put there stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from pipeline.attest.cosign import (
    ENVELOPE_MEDIA,
    SIGNATURE_MEDIA,
    CosignLayer,
    attestation_attachment,
    signature_attachment,
)
from pipeline.attest.envelope import Envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import BILL_MEDIA
from pipeline.evidence.evidence_set import is_set
from pipeline.model import canonical_json, sha256_of
from pipeline.oci.document import OCI_CONFIG, Descriptor, Document
from pipeline.publish.attachment import PREDICATE_NOTE, Attachment, Content
from pipeline.publish.naming import Naming, is_said, layers_there
from pipeline.registry.referrers import fallback_tag
from pipeline.registry.repository import Repository


@dataclass(frozen=True)
class EvidenceBundle:
    """What goes along with an image: signed statements by platform, and who signs the name."""

    envelopes: Mapping[str, Sequence[Envelope]] = field(default_factory=dict)
    signer: Signer | None = None
    now: datetime | None = None  # when the name is given


def statements_of(bundle: EvidenceBundle) -> list[Attachment]:
    """Statements and bills, each as an artifact of its own."""
    return [
        made
        for platform, envelopes in bundle.envelopes.items()
        for envelope in envelopes
        for made in _attachments(envelope, platform)
    ]


def _attachments(envelope: Envelope, platform: str) -> list[Attachment]:
    kind = envelope.statement.predicate_type
    layer = Content(media_type=ENVELOPE_MEDIA, data=envelope.dump())
    notes = {PREDICATE_NOTE: kind}
    found = [
        Attachment(
            artifact_type=ENVELOPE_MEDIA, layers=(layer,), annotations=notes, platform=platform
        )
    ]
    if media := BILL_MEDIA.get(kind):
        bill = Content(media_type=media, data=canonical_json(envelope.statement.predicate) + b"\n")
        found.append(Attachment(artifact_type=media, layers=(bill,), platform=platform))
    return found


def for_cosign(
    repository: Repository,
    subject: Document,
    envelopes: Sequence[Envelope],
    naming: Naming | None,
) -> list[Attachment]:
    """An image's statements, and that it goes by this name, where cosign looks for them."""
    found = []
    if envelopes:
        statements = [_content(attestation_attachment(e)) for e in envelopes]
        found.append(_gathered(repository, subject, "att", statements))
    if naming is not None:
        new, with_set = [], next((sha256_of(e.payload) for e in envelopes if is_set(e)), None)
        if not is_said(repository, subject.digest, naming, with_set):
            given = (naming.reference, naming.signer, naming.at, with_set)
            new = [_content(signature_attachment(subject.digest, *given))]
        found.append(_gathered(repository, subject, "sig", new))
    return found


def _content(made: CosignLayer) -> Content:
    return Content(media_type=made.media_type, data=made.data, annotations=made.annotations)


def _gathered(
    repository: Repository, subject: Document, ending: str, new: Sequence[Content]
) -> Attachment:
    """An image as cosign stores things: layers that were there, then new ones."""
    media = SIGNATURE_MEDIA if ending == "sig" else ENVELOPE_MEDIA
    there = layers_there(repository, subject.digest, ending, media)
    known = [(d.digest, d.annotations) for d in there]
    fresh = tuple(c for c in new if (c.descriptor.digest, c.descriptor.annotations) not in known)
    layers = [*there, *(c.descriptor for c in fresh)]
    return Attachment(
        # cosign's own names for these, where it attaches them as referrers
        artifact_type=f"application/vnd.dev.cosign.artifact.{ending}.v1+json",
        kept=tuple(there),
        layers=fresh,
        config=_config(layers),
        tag=f"{fallback_tag(subject.digest)}.{ending}",
        # statements are referrers already, each for itself
        is_referrer=ending == "sig",
    )


def _config(layers: Sequence[Descriptor]) -> Content:
    """An image's config that says no more than cosign wants to see."""
    rootfs = {"type": "layers", "diff_ids": [x.digest for x in layers]}
    said = {"architecture": "", "os": "", "config": {}, "rootfs": rootfs}
    return Content(media_type=OCI_CONFIG, data=canonical_json(said))
