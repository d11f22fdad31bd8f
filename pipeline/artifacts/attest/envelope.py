"""DSSE envelopes: a statement and the signatures over exactly its bytes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, StringConstraints

from pipeline.artifacts.attest.names import PAYLOAD
from pipeline.artifacts.attest.statement import Statement, read_statement
from pipeline.artifacts.attest.strict import MAX_BYTES, as_model, read_base64, read_signed_json
from pipeline.core.errors import RecordInvalid
from pipeline.core.files import read_plain
from pipeline.core.model import Digest, Frozen, canonical_json

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer

# we try each signature with every trusted key: the work must be bounded
MOST_SIGNATURES = 16
SUFFIX = ".dsse.json"


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the bytes that are really signed.

    https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
    """
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


class _SignatureJson(Frozen):
    """A signature as JSON. cosign leaves `keyid` empty or out."""

    keyid: Digest | Literal[""] | None = None
    # a P-256 signature has 96 characters, a P-521 one 188
    sig: Annotated[str, StringConstraints(min_length=1, max_length=400)]


class _EnvelopeJson(Frozen):
    """An envelope as JSON."""

    payload_type: Literal["application/vnd.in-toto+json"] = Field(alias="payloadType")
    payload: str
    signatures: Annotated[list[_SignatureJson], Field(max_length=MOST_SIGNATURES)]


@dataclass(frozen=True)
class Signature:
    """A signature and, where it names one, the id of its key."""

    key_id: str | None
    sig: bytes


@dataclass(frozen=True)
class Envelope:
    """A statement as it was signed: the payload's own bytes, never bytes written anew."""

    payload: bytes
    signatures: tuple[Signature, ...]
    statement: Statement

    def dump(self) -> bytes:
        """The envelope as a file."""
        signed = [
            {"keyid": s.key_id or "", "sig": base64.b64encode(s.sig).decode()}
            for s in self.signatures
        ]
        payload = base64.b64encode(self.payload).decode()
        written = {"payloadType": PAYLOAD, "payload": payload, "signatures": signed}
        return canonical_json(written) + b"\n"

    @property
    def signed_bytes(self) -> bytes:
        return pae(PAYLOAD, self.payload)


def enclose(statement: Statement, signers: Sequence[Signer] = ()) -> Envelope:
    """Puts a statement into an envelope and signs it with each signer; unsigned without one."""
    envelope = Envelope(statement.dump(), (), statement)
    for signer in signers:
        envelope = countersigned(envelope, signer)
    return envelope


def countersigned(envelope: Envelope, signer: Signer) -> Envelope:
    """Adds a signature to the envelope; a key signs only once."""
    # this also replaces a false one under our name
    others = tuple(s for s in envelope.signatures if s.key_id != signer.key_id)
    mine = Signature(signer.key_id, signer.sign(envelope.signed_bytes))
    return Envelope(envelope.payload, (*others, mine), envelope.statement)


def read_envelope(data: bytes, what: str) -> Envelope:
    """Reads an envelope from bytes of unknown origin; believes nothing in it yet."""
    written = as_model(_EnvelopeJson, read_signed_json(data, what), what, "the envelope")
    payload = read_base64(written.payload, f"{what}: payload")
    signatures = [
        Signature(s.keyid or None, read_base64(s.sig, f"{what}: signature"))
        for s in written.signatures
    ]
    named = [s.key_id for s in signatures if s.key_id]
    # a policy that asks for two signatures must not get one twice
    if len(named) != len(set(named)):
        raise RecordInvalid(f"{what}: one key signed twice")
    return Envelope(payload, tuple(signatures), read_statement(payload, f"{what}: statement"))


def read_kept_envelope(path: Path) -> Envelope | None:
    """Reads the envelope in a file; none if it is missing or cannot be read."""
    try:
        data = read_plain(path, MAX_BYTES)
        return read_envelope(data, path.name) if data is not None else None
    except (OSError, RecordInvalid):
        return None


def sign_or_countersign(path: Path, statement: Statement, signers: Sequence[Signer]) -> Envelope:
    """Adds our signatures to the kept envelope if it states the same, else makes a new one.

    It replaces a kept statement that is dated in the future: no verifier would accept it, and our
    signature would only confirm its wrong time.
    """
    stored, now = read_kept_envelope(path), statement.recorded or datetime.now(UTC)
    is_true = stored is not None and stored.statement.has_happened(now)
    if stored is None or not is_true or stored.statement.core() != statement.core():
        return enclose(statement, signers)
    for signer in signers:
        # cryptography takes longer to load than all the rest: load it only for users with a key
        from pipeline.artifacts.attest.keys import is_valid_signature

        # a signature under the signer's key id may be false
        mine = [s.sig for s in stored.signatures if s.key_id == signer.key_id]
        if not any(is_valid_signature(signer.public, sig, stored.signed_bytes) for sig in mine):
            stored = countersigned(stored, signer)
    return stored
