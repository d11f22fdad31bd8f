"""A Sigstore bundle with a DSSE envelope, signed by a plain elliptic-curve key."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import Field, ValidationError

from pipeline.artifacts.attest.envelope import pae
from pipeline.artifacts.attest.keys import public_pem
from pipeline.core.errors import ModelSignatureInvalid
from pipeline.core.files import read_plain
from pipeline.core.model import ForeignModel

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_MOST_BYTES = 64 << 20
# as long as the curve, which is what model-signing uses
_HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}


class _Signature(ForeignModel):
    sig: str


class _Envelope(ForeignModel):
    payload: str
    payloadType: str
    # DSSE allows several, a Sigstore bundle has exactly one
    signatures: list[_Signature] = Field(min_length=1, max_length=1)


class _PublicKey(ForeignModel):
    # a hint only: the signature decides
    hint: str | None = None


class _Material(ForeignModel):
    publicKey: _PublicKey


class _Bundle(ForeignModel):
    mediaType: str
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


def key_hint(key: ec.EllipticCurvePublicKey) -> str:
    """The hint by which a bundle names its key."""
    return hashlib.sha256(public_pem(key).encode()).hexdigest()


def signed(statement: dict[str, Any], key: ec.EllipticCurvePrivateKey) -> bytes:
    """Signs a statement in a bundle; returns the file's bytes."""
    payload = json.dumps(statement, indent=2, sort_keys=True).encode()
    signature = key.sign(pae(PAYLOAD_TYPE, payload), ec.ECDSA(_HASHES[key.curve.name]))
    whole = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": key_hint(key.public_key())},
            # a plain key needs no transparency log; verifiers must know that, too
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    # the signature covers only the payload, so this layout can change freely
    return json.dumps(whole, indent=1).encode() + b"\n"


def opened(path: Path, key: ec.EllipticCurvePublicKey) -> bytes:
    """Reads the payload of a bundle, which this key must have signed."""
    try:
        data = read_plain(path, _MOST_BYTES)
        if data is None:
            raise ModelSignatureInvalid(f"{path.name}: is too large for a signature")
        bundle = _Bundle.model_validate_json(data)
    except OSError as error:
        raise ModelSignatureInvalid(
            f"{path}: the signature cannot be read ({error.strerror})",
            "Name it with --signature, or sign the set with `sm120 weights sign DIR`.",
        ) from error
    except ValidationError as error:
        where = ".".join(str(p) for p in error.errors()[0]["loc"])
        raise ModelSignatureInvalid(f"{path.name}: is not a Sigstore bundle ({where})") from error
    envelope, hint = bundle.dsseEnvelope, bundle.verificationMaterial.publicKey.hint
    problem = ""
    if bundle.mediaType != MEDIA_TYPE:
        problem = f"has the media type {bundle.mediaType[:80]!r}, not {MEDIA_TYPE}"
    elif hint and hint != key_hint(key):
        problem = "was signed with another key"
    elif envelope.payloadType != PAYLOAD_TYPE:
        problem = "does not hold an in-toto statement"
    if problem:
        raise ModelSignatureInvalid(f"{path.name}: {problem}")
    try:
        payload = base64.b64decode(envelope.payload, validate=True)
        signature = base64.b64decode(envelope.signatures[0].sig, validate=True)
        key.verify(signature, pae(PAYLOAD_TYPE, payload), ec.ECDSA(_HASHES[key.curve.name]))
    # binascii.Error is a ValueError
    except (ValueError, InvalidSignature) as error:
        message = f"{path.name}: the signature does not match its statement and key"
        raise ModelSignatureInvalid(message) from error
    return payload
