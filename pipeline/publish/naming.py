"""That an image goes by a tag: signed anew whenever the tag moves, each time later than before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from pipeline.attest.cosign import (
    SIGNATURE_MEDIA,
    SIGNATURE_NOTE,
    SignedName,
    read_payload,
)
from pipeline.attest.keys import Signer, is_valid_signature
from pipeline.attest.strict import read_base64
from pipeline.errors import NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.oci.document import Descriptor
from pipeline.registry.download import read_blob
from pipeline.registry.referrers import fallback_tag
from pipeline.registry.repository import Repository

_MOST_PAYLOAD_BYTES = 1 << 16


@dataclass(frozen=True)
class Naming:
    """Who says that images go by a name, and since when."""

    reference: str
    signer: Signer
    at: datetime | None
    moves: bool  # the tag named another image before, or none


def plan_naming(
    repository: Repository, root: str, tag: str, signer: Signer, now: datetime | None
) -> Naming:
    """The name that an image will get; later than the last time, also where a clock went back."""
    reference = f"{repository}:{tag}"
    named = repository.find_manifest(tag)
    moves = named is None or named.digest != root
    digests = {root, *([named.digest] if named else [])}
    said = [n.at for d in digests for n in own_names(repository, d, signer) if n.at]
    if now is not None and said:
        now = max(now, max(said) + timedelta(seconds=1))
    return Naming(reference, signer, now, moves)


def is_said(
    repository: Repository, digest: str, naming: Naming, evidence_set: str | None = None
) -> bool:
    """Whether the key says so already; a tag that moves, or has other evidence, is signed again.

    Only the last name counts: one that commits to an older set would hide the newer.
    """
    if naming.moves and naming.at:
        return False
    said = [
        n
        for n in own_names(repository, digest, naming.signer)
        if n.digest == digest and n.reference == naming.reference
    ]
    last = max(said, key=lambda n: n.at.timestamp() if n.at else 0, default=None)
    return last is not None and last.evidence_set == evidence_set


def own_names(repository: Repository, digest: str, signer: Signer) -> Iterator[SignedName]:
    """What this very key said beside an image; of others' words nothing is read."""
    for layer in layers_there(repository, digest, "sig", SIGNATURE_MEDIA):
        if layer.size_bytes > _MOST_PAYLOAD_BYTES:
            continue
        try:
            signature = read_base64(layer.annotations.get(SIGNATURE_NOTE, ""), "signature")
            data = read_blob(repository, layer, _MOST_PAYLOAD_BYTES)
            if is_valid_signature(signer.public, signature, data):
                yield read_payload(data)
        except (RecordInvalid, RegistryBroken, NotInRegistry):
            # what cannot be read was not said: it is signed anew
            continue


def layers_there(
    repository: Repository, digest: str, ending: str, media_type: str
) -> list[Descriptor]:
    """What lies under one of cosign's tags already."""
    found = repository.find_manifest(f"{fallback_tag(digest)}.{ending}")
    if found is None or (found.subject and found.subject.digest != digest):
        return []
    return [layer for layer in found.layers if layer.media_type == media_type]
