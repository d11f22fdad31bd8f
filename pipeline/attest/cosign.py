"""What cosign looks for beside an image: its signature's payload and its layers' notes.

A payload may say when a digest got its name, and with which set of evidence. cosign leaves that
to whoever reads it. By the time, a tag that was moved back to an older image, once signed under the
same tag, is told from the newest; by the set, evidence that was taken away since is missed.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from pipeline.attest.envelope import Envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import IMAGE_SIGNATURE
from pipeline.attest.statement import read_stamp, stamp
from pipeline.attest.strict import as_model, read_json
from pipeline.model import Digest, Frozen, canonical_json

SIGNATURE_NOTE = "dev.cosignproject.cosign/signature"
SIGNATURE_MEDIA = "application/vnd.dev.cosign.simplesigning.v1+json"
NAMED_AT = "sm120.named_at"
NAMED_WITH = "sm120.evidence_set"
ENVELOPE_MEDIA = "application/vnd.dsse.envelope.v1+json"
# a plain note that an image was published although its gates had not passed
UNGATED_MEDIA = "application/vnd.sm120.ungated.v1+json"


@dataclass(frozen=True)
class CosignLayer:
    """A blob that publishing attaches to an image, with the layer's media type and notes."""

    data: bytes
    media_type: str
    annotations: dict[str, str]


class _Image(Frozen):
    digest: Digest = Field(alias="docker-manifest-digest")


class _Identity(Frozen):
    reference: str = Field(alias="docker-reference")


class _Critical(Frozen):
    identity: _Identity
    image: _Image
    type: Literal["cosign container image signature"]


class _Payload(Frozen):
    critical: _Critical
    optional: dict[str, Any] | None = None


class NameSaid(Frozen):
    """What an image's signature says: this digest goes by this name, since then."""

    digest: Digest
    reference: str
    at: datetime | None
    evidence_set: Digest | None = None  # of the set's signed bytes


def signature_payload(
    digest: str, reference: str, at: datetime | None = None, evidence_set: str | None = None
) -> bytes:
    """`simple signing`: this digest goes by this name, with this set of evidence."""
    said = {NAMED_AT: stamp(at) if at else None, NAMED_WITH: evidence_set}
    known = {key: value for key, value in said.items() if value is not None}
    return canonical_json(
        {
            "critical": {
                "identity": {"docker-reference": reference},
                "image": {"docker-manifest-digest": digest},
                "type": IMAGE_SIGNATURE,
            },
            "optional": known or None,
        }
    )


def read_payload(data: bytes) -> NameSaid:
    """A payload of unknown origin; others than we write other things into `optional`."""
    found = as_model(_Payload, read_json(data, "payload"), "payload")
    more = found.optional or {}
    said = more.get(NAMED_AT)
    values = {
        "digest": found.critical.image.digest,
        "reference": found.critical.identity.reference,
        "at": None if said is None else read_stamp(said),
        "evidence_set": more.get(NAMED_WITH),
    }
    return as_model(NameSaid, values, "payload")


def signature_attachment(
    digest: str,
    reference: str,
    signer: Signer,
    at: datetime | None = None,
    evidence_set: str | None = None,
) -> CosignLayer:
    """An image's signature, for the tag `sha256-<hex>.sig`."""
    payload = signature_payload(digest, reference, at, evidence_set)
    signature = base64.b64encode(signer.sign(payload)).decode()
    return CosignLayer(payload, SIGNATURE_MEDIA, {SIGNATURE_NOTE: signature})


def attestation_attachment(envelope: Envelope) -> CosignLayer:
    """A signed statement, for the tag `sha256-<hex>.att`."""
    notes = {SIGNATURE_NOTE: "", "predicateType": envelope.statement.predicate_type}
    return CosignLayer(envelope.dump(), ENVELOPE_MEDIA, notes)
