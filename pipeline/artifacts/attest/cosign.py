"""Signatures and attestations in the form in which cosign finds them beside an image.

cosign ignores `optional` of a signature's payload, so it can hold three things of ours: when a
digest got its name, the digest of its evidence set, and the index that the name was given to. The
time reveals a tag that was moved back to an older signed image; the set reveals evidence that was
removed later; the index reveals a tag that was moved to one platform of it.
https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from pipeline.artifacts.attest.envelope import Envelope
from pipeline.artifacts.attest.keys import Signer
from pipeline.artifacts.attest.names import IMAGE_SIGNATURE
from pipeline.artifacts.attest.statement import read_stamp, stamp
from pipeline.artifacts.attest.strict import as_model, read_signed_json
from pipeline.core.model import Digest, Frozen, canonical_json

SIGNATURE_NOTE = "dev.cosignproject.cosign/signature"
SIGNATURE_MEDIA = "application/vnd.dev.cosign.simplesigning.v1+json"
NAMED_AT = "sm120.named_at"
NAMED_WITH = "sm120.evidence_set"
NAMED_IN = "sm120.index"
ENVELOPE_MEDIA = "application/vnd.dsse.envelope.v1+json"
# an unsigned note that an image was published although its gates had not passed
UNGATED_MEDIA = "application/vnd.sm120.ungated.v1+json"


@dataclass(frozen=True)
class Content:
    """A blob that is attached to an image, with its layer's media type and annotations."""

    data: bytes
    media_type: str
    annotations: dict[str, str] = field(default_factory=dict)


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


class SignedName(Frozen):
    """What an image signature claims: this digest has this name, since then."""

    digest: Digest
    reference: str
    at: datetime | None
    evidence_set: Digest | None = None  # of the set's signed bytes
    index: Digest | None = None  # the name is this index's; the digest is one image of it


def read_payload(data: bytes) -> SignedName:
    """Reads a payload of unknown origin; other tools put other things into `optional`."""
    payload = as_model(_Payload, read_signed_json(data, "payload"), "payload")
    optional = payload.optional or {}
    named_at = optional.get(NAMED_AT)
    values = {
        "digest": payload.critical.image.digest,
        "reference": payload.critical.identity.reference,
        "at": None if named_at is None else read_stamp(named_at),
        "evidence_set": optional.get(NAMED_WITH),
        "index": optional.get(NAMED_IN),
    }
    return as_model(SignedName, values, "payload")


def signature_attachment(
    digest: str,
    reference: str,
    signer: Signer,
    at: datetime | None = None,
    evidence_set: str | None = None,
    index: str | None = None,
) -> Content:
    """An image's signature, for the tag `sha256-<hex>.sig`: this digest has this name."""
    extra = {NAMED_AT: stamp(at) if at else None, NAMED_WITH: evidence_set, NAMED_IN: index}
    known = {key: value for key, value in extra.items() if value is not None}
    critical = {
        "identity": {"docker-reference": reference},
        "image": {"docker-manifest-digest": digest},
        "type": IMAGE_SIGNATURE,
    }
    payload = canonical_json({"critical": critical, "optional": known or None})
    signature = base64.b64encode(signer.sign(payload)).decode()
    return Content(payload, SIGNATURE_MEDIA, {SIGNATURE_NOTE: signature})


def attestation_attachment(envelope: Envelope) -> Content:
    """A signed statement, for the tag `sha256-<hex>.att`."""
    # cosign expects this annotation, and reads the signature in the envelope
    annotations = {SIGNATURE_NOTE: "", "predicateType": envelope.statement.predicate_type}
    return Content(envelope.dump(), ENVELOPE_MEDIA, annotations)
