"""What cosign looks for beside an image: its signature's payload and its layers' notes."""

from __future__ import annotations

import base64
from dataclasses import dataclass

from pipeline.keys import Signer
from pipeline.model import canonical_json
from pipeline.record.envelope import Envelope
from pipeline.record.names import IMAGE_SIGNATURE

SIGNATURE_NOTE = "dev.cosignproject.cosign/signature"
SIGNATURE_MEDIA = "application/vnd.dev.cosign.simplesigning.v1+json"
ENVELOPE_MEDIA = "application/vnd.dsse.envelope.v1+json"
# a plain note that an image was published although its gates had not passed
UNGATED_MEDIA = "application/vnd.sm120.ungated.v1+json"


@dataclass(frozen=True)
class CosignLayer:
    """A blob that publishing attaches to an image, with the layer's media type and notes."""

    data: bytes
    media_type: str
    annotations: dict[str, str]


def signature_payload(digest: str, reference: str) -> bytes:
    """`simple signing`: this digest goes by this name."""
    return canonical_json(
        {
            "critical": {
                "identity": {"docker-reference": reference},
                "image": {"docker-manifest-digest": digest},
                "type": IMAGE_SIGNATURE,
            },
            "optional": None,
        }
    )


def signature_attachment(digest: str, reference: str, signer: Signer) -> CosignLayer:
    """An image's signature, for the tag `sha256-<hex>.sig`."""
    payload = signature_payload(digest, reference)
    signature = base64.b64encode(signer.sign(payload)).decode()
    return CosignLayer(payload, SIGNATURE_MEDIA, {SIGNATURE_NOTE: signature})


def attestation_attachment(envelope: Envelope) -> CosignLayer:
    """A signed statement, for the tag `sha256-<hex>.att`."""
    notes = {SIGNATURE_NOTE: "", "predicateType": envelope.statement.predicate_type}
    return CosignLayer(envelope.dump(), ENVELOPE_MEDIA, notes)
