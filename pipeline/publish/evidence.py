"""An image's evidence on its way to a registry, in the forms that others look for.

Each signed statement and each bill of materials becomes a referrer of its own. cosign looks under
tags instead: all statements stand together under `sha256-<hex>.att`, signatures of the digest
under `sha256-<hex>.sig`. What others put there stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.errors import RecordInvalid
from pipeline.keys import Signer, holds
from pipeline.model import canonical_json, sha256_of
from pipeline.publish.attachment import PREDICATE_NOTE, Attachment, Content
from pipeline.record.cosign import (
    ENVELOPE_MEDIA,
    SIGNATURE_MEDIA,
    SIGNATURE_NOTE,
    CosignLayer,
    attestation_attachment,
    signature_attachment,
    signature_payload,
)
from pipeline.record.envelope import Envelope
from pipeline.record.names import BILL_MEDIA
from pipeline.record.strict import read_base64
from pipeline.registry.document import Descriptor, Document
from pipeline.registry.referrers import fallback_tag
from pipeline.registry.repository import Repository

CONFIG = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Dossier:
    """What goes along with an image: signed statements by platform, and who signs the name."""

    envelopes: Mapping[str, Sequence[Envelope]] = field(default_factory=dict)
    signer: Signer | None = None


def statements_of(dossier: Dossier) -> list[Attachment]:
    """Statements and bills, each as an artifact of its own."""
    return [
        made
        for platform, envelopes in dossier.envelopes.items()
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
    tag: str,
    envelopes: Sequence[Envelope],
    signer: Signer | None,
) -> list[Attachment]:
    """An image's statements, and that it goes by this tag, where cosign looks for them."""
    found = []
    if envelopes:
        statements = [_content(attestation_attachment(e)) for e in envelopes]
        found.append(_gathered(repository, subject, "att", statements))
    if signer is not None:
        name = f"{repository}:{tag}"
        payload = signature_payload(subject.digest, name)
        there = _layers(repository, subject, "sig")
        # a key says the same thing only once: signatures are never the same bytes again
        is_said = any(_is_by(signer, layer, payload) for layer in there)
        new = [] if is_said else [_content(signature_attachment(subject.digest, name, signer))]
        found.append(_gathered(repository, subject, "sig", new))
    return found


def _content(made: CosignLayer) -> Content:
    return Content(media_type=made.media_type, data=made.data, annotations=made.annotations)


def _is_by(signer: Signer, layer: Descriptor, payload: bytes) -> bool:
    try:
        written = read_base64(layer.annotations.get(SIGNATURE_NOTE, ""), "signature")
    except RecordInvalid:
        return False
    return layer.digest == sha256_of(payload) and holds(signer.public, written, payload)


def _gathered(
    repository: Repository, subject: Document, ending: str, new: Sequence[Content]
) -> Attachment:
    """An image as cosign stores things: layers that were there, then new ones."""
    there = _layers(repository, subject, ending)
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


def _layers(repository: Repository, subject: Document, ending: str) -> list[Descriptor]:
    media = SIGNATURE_MEDIA if ending == "sig" else ENVELOPE_MEDIA
    found = repository.find_manifest(f"{fallback_tag(subject.digest)}.{ending}")
    if found is None or (found.subject and found.subject.digest != subject.digest):
        return []
    return [layer for layer in found.layers if layer.media_type == media]


def _config(layers: Sequence[Descriptor]) -> Content:
    """An image's config that says no more than cosign wants to see."""
    rootfs = {"type": "layers", "diff_ids": [x.digest for x in layers]}
    said = {"architecture": "", "os": "", "config": {}, "rootfs": rootfs}
    return Content(media_type=CONFIG, data=canonical_json(said))
