"""The evidence of a publish, in the forms in which registries and cosign look for it.

Each signed statement and each bill of materials becomes a referrer of its own. cosign looks under
tags instead: all statements together under `sha256-<hex>.att`, signatures of the digest under
`sha256-<hex>.sig`. What other tools put there stays.
https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pipeline.artifacts.attest import cosign
from pipeline.artifacts.attest.envelope import Envelope, read_envelope
from pipeline.artifacts.attest.keys import Signer, is_valid_signature
from pipeline.artifacts.attest.names import BILL_MEDIA, UNGATED
from pipeline.artifacts.attest.predicates import Ungated
from pipeline.artifacts.attest.statement import (
    CLOCKS_APART,
    make_statement,
    moment,
    read_stamp,
)
from pipeline.artifacts.attest.strict import read_base64
from pipeline.artifacts.oci.document import OCI_CONFIG, Descriptor, Document
from pipeline.artifacts.registry.referrers import fallback_tag
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import Store, read_own
from pipeline.core.errors import NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.publish.attachment import PREDICATE_NOTE, Attachment, described
from pipeline.evidence.statements.evidence_set import (
    evidence_folder,
    holds_set,
    keep_set,
    kept_envelopes,
    read_set,
    set_statement,
    sign_and_keep,
)
from pipeline.images.assemble.image import Built
from pipeline.images.gate.state import GateState
from pipeline.images.spec.checkout import Checkout

# a signature payload is below a kilobyte
_MOST_PAYLOAD_BYTES = 1 << 16


@dataclass(frozen=True)
class EvidenceBundle:
    """What is published with an image: signed statements by platform, and who signs the name."""

    envelopes: Mapping[str, Sequence[Envelope]] = field(default_factory=dict)
    signer: Signer | None = None
    now: datetime | None = None  # when the name is given


def make_bundle(
    checkout: Checkout,
    store: Store,
    built: Sequence[Built],
    signer: Signer | None,
    forced: Sequence[GateState],
    reason: str,
    reference: str,
    *,
    spdx: bool = False,
) -> EvidenceBundle:
    """Collects all evidence for a publish; a signed statement says if gates did not pass."""
    when, signers = moment(), [signer] if signer else []
    envelopes: dict[str, list[Envelope]] = {}
    for image in built:
        if signers:
            # loads slowly: only signing pays for it
            from pipeline.evidence.statements.image import record_image

            # an equal statement with this signature stays as it is
            record_image(checkout, store, image, signers, when, spdx=spdx)
        paths = kept_envelopes(store, image.name, image.platform, image.digest)
        # an error, not a gap: a set would no longer match the published statements
        read = [read_envelope(read_own(path), path.name) for path in paths]
        # a file that was copied into the folder from another image is left out
        about = [e for e in read if e.statement.is_about(image.digest)]
        sets = [read_set(e.statement) for e in about if e.signatures and holds_set(e)]
        named = {each.payload for listed in sets for each in listed.statements}
        # the signed statements, and all that a signed set names
        envelopes[image.platform] = [
            e for e in about if e.signatures or sha256_of(e.payload) in named
        ]
    for gates in forced if signers else ():
        image = next(b for b in built if b.platform == gates.platform)
        subject = (image.name, image.platform, image.digest)
        ungated = Ungated(
            image=image.name,
            platform=image.platform,
            reference=reference,
            gates=gates.message,
            reason=reason,
        )
        # about one publish, not the image: it may be ungated in one registry and gated in another
        place = sha256_of(reference.encode()).removeprefix("sha256:")[:16]
        folder = evidence_folder(store, *subject) / "published" / place
        statement = make_statement(image.name, image.digest, UNGATED, ungated.model_dump(), when)
        every = [e for e in envelopes[gates.platform] if not holds_set(e)]
        every.append(sign_and_keep(store, folder, "ungated", statement, signers))
        # a set that lists all of them, with the ungated one
        listing = set_statement(*subject, every, reason, when)
        envelopes[gates.platform] = [*every, keep_set(store, folder, listing, signers)]
    return EvidenceBundle(envelopes, signer, read_stamp(when.at))


def statements_of(bundle: EvidenceBundle) -> list[Attachment]:
    """Statements and bills, each as an artifact of its own."""
    attachments = []
    for platform, envelope in ((p, e) for p, each in bundle.envelopes.items() for e in each):
        kind, predicate = envelope.statement.predicate_type, envelope.statement.predicate
        attachments.append(
            Attachment(
                artifact_type=cosign.ENVELOPE_MEDIA,
                layers=(cosign.Content(envelope.dump(), cosign.ENVELOPE_MEDIA),),
                annotations={PREDICATE_NOTE: kind},
                platform=platform,
            )
        )
        if media := BILL_MEDIA.get(kind):
            bill = cosign.Content(canonical_json(predicate) + b"\n", media)
            attachments.append(Attachment(artifact_type=media, layers=(bill,), platform=platform))
    return attachments


@dataclass(frozen=True)
class CosignTags:
    """The contents of cosign's tags of one image, read once."""

    statements: tuple[Descriptor, ...] = ()
    signatures: tuple[Descriptor, ...] = ()
    names: tuple[cosign.SignedName, ...] = ()  # in those signatures that our own key made


def read_cosign_tags(repository: Repository, digest: str, signer: Signer | None) -> CosignTags:
    """The layers under cosign's tags, and the names that this key has given the image."""

    def layers(suffix: str, media_type: str) -> tuple[Descriptor, ...]:
        document = repository.find_manifest(f"{fallback_tag(digest)}.{suffix}")
        # another image's manifest may have been pushed under this tag
        if document is None or (document.subject and document.subject.digest != digest):
            return ()
        return tuple(layer for layer in document.layers if layer.media_type == media_type)

    statements = layers("att", cosign.ENVELOPE_MEDIA)
    signatures = layers("sig", cosign.SIGNATURE_MEDIA) if signer else ()
    names = []
    # larger ones are not ours
    for layer in (x for x in signatures if signer and x.size_bytes <= _MOST_PAYLOAD_BYTES):
        # a signature that cannot be read counts as none: the name is signed again
        with suppress(RecordInvalid, RegistryBroken, NotInRegistry):
            signature = read_base64(layer.annotations.get(cosign.SIGNATURE_NOTE, ""), "signature")
            data = repository.read_blob(layer, _MOST_PAYLOAD_BYTES)
            # other keys' payloads may say anything
            if signer and is_valid_signature(signer.public, signature, data):
                names.append(cosign.read_payload(data))
    return CosignTags(statements, signatures, tuple(names))


@dataclass(frozen=True)
class Naming:
    """The name that images get, who signs it, and since when it holds."""

    reference: str
    signer: Signer
    at: datetime | None
    moves: bool  # the tag named another image before, or none
    index: str | None = None  # the index that the tag names, where it is one
    # later than all names dated in the future, if any: one of two clocks is wrong, and a verifier
    # believes the name that is not in the future by its own clock
    later: datetime | None = None


def plan_naming(
    repository: Repository,
    root: Document,
    tag: str,
    bundle: EvidenceBundle,
    names: Sequence[cosign.SignedName],
) -> Naming | None:
    """Plans the name that an image will get, dated later than every earlier name under this tag.

    Later even if a clock was set back, because a verifier takes the latest name for the true one.
    If earlier names are in the future, either their clock was ahead or ours is behind: we sign both
    times, so that the name holds in either case.
    """
    if bundle.signer is None:
        return None
    now, current = bundle.now, repository.find_manifest(tag)
    moves = current is None or current.digest != root.digest
    earlier = list(names)
    if current is not None and moves:
        earlier += read_cosign_tags(repository, current.digest, bundle.signer).names
    index, later = root.digest if root.kind == "index" else None, None
    if now is not None and (times := [n.at + timedelta(seconds=1) for n in earlier if n.at]):
        near = [at for at in times if at <= now + CLOCKS_APART]
        later = max(times) if len(near) < len(times) else None
        now = max([now, *near])
    return Naming(f"{repository}:{tag}", bundle.signer, now, moves, index, later)


def for_cosign(
    subject: Document, envelopes: Sequence[Envelope], naming: Naming | None, found: CosignTags
) -> list[Attachment]:
    """An image's statements, and the signature of its name, where cosign looks for them."""
    attachments = []
    if envelopes:
        statements = [cosign.attestation_attachment(e) for e in envelopes]
        attachments.append(_under_tag(subject, "att", found.statements, statements))
    if naming is not None:
        evidence_set = next((sha256_of(e.payload) for e in envelopes if holds_set(e)), None)
        # an image's name includes the index over it; what the tag itself names has none
        new, index = [], naming.index if naming.index != subject.digest else None
        given = (subject.digest, naming.reference, index)
        same = [n for n in found.names if (n.digest, n.reference, n.index) == given]
        # no verifier believes a name dated in the future
        same = [n for n in same if not (n.at and naming.at) or n.at <= naming.at + CLOCKS_APART]
        # only the last name counts: one that covers an older evidence set would hide the newer
        last = max(same, key=lambda n: n.at.timestamp() if n.at else 0, default=None)
        # a tag that moves is always signed again: a verifier compares the time of the move
        has_moved = naming.moves and naming.at
        if has_moved or last is None or last.evidence_set != evidence_set:
            times = [naming.at, *([naming.later] if naming.later else [])]
            who = (subject.digest, naming.reference, naming.signer)
            new = [cosign.signature_attachment(*who, at, evidence_set, index) for at in times]
        attachments.append(_under_tag(subject, "sig", found.signatures, new))
    return attachments


def _under_tag(
    subject: Document, suffix: str, found: Sequence[Descriptor], new: Sequence[cosign.Content]
) -> Attachment:
    """An image as cosign stores things: the layers found, then new ones."""
    # the annotation is the signature: the same payload by another key is another layer
    known = [(d.digest, d.annotations) for d in found]
    fresh = tuple(c for c in new if (sha256_of(c.data), c.annotations) not in known)
    # the least config that cosign accepts
    diff_ids = [x.digest for x in (*found, *map(described, fresh))]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    config = {"architecture": "", "os": "", "config": {}, "rootfs": rootfs}
    return Attachment(
        # cosign's own names for these, where it attaches them as referrers
        artifact_type=f"application/vnd.dev.cosign.artifact.{suffix}.v1+json",
        kept=tuple(found),
        layers=fresh,
        config=cosign.Content(canonical_json(config), OCI_CONFIG),
        tag=f"{fallback_tag(subject.digest)}.{suffix}",
        # statements are referrers already, each for itself
        is_referrer=suffix == "sig",
    )
