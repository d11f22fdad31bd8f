"""The evidence that goes with a publish: kept statements, or new ones where there is a key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.assemble.image import Built
from pipeline.attest.envelope import Envelope, read_envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import UNGATED
from pipeline.attest.predicates import Ungated
from pipeline.attest.statement import Moment, make_statement, moment, read_stamp
from pipeline.evidence.evidence_set import (
    evidence_folder,
    is_set,
    keep,
    keep_set,
    kept,
    read_set,
    set_statement,
)
from pipeline.model import sha256_of
from pipeline.publish.evidence import EvidenceBundle
from pipeline.publish.gates import GateState
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, read_own


def record_all(
    checkout: Checkout,
    store: Store,
    built: Sequence[Built],
    signer: Signer,
    when: Moment,
    *,
    spdx: bool = False,
) -> None:
    """State and sign each image; an equal statement with this signature stays as it is."""
    # loads slowly: only who signs pays for it
    from pipeline.evidence.image import record_image

    for image in built:
        record_image(checkout, store, image, [signer], when, spdx=spdx)


def signed_records(store: Store, image: Built) -> list[Envelope]:
    """The statements of an image that somebody signed, and all that a signed set names.

    A damaged file is an error that names it.
    """
    paths = kept(store, image.name, image.platform, image.digest)
    # an error, not a gap: a set would no longer match what is published
    envelopes = [read_envelope(read_own(path), path.name) for path in paths]
    # a file that was copied here from another image is left out
    about = [e for e in envelopes if e.statement.is_about(image.digest)]
    named = {
        each.payload
        for e in about
        if e.signatures and is_set(e)
        for each in read_set(e.statement).statements
    }
    return [e for e in about if e.signatures or sha256_of(e.payload) in named]


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
    """All evidence for a publish; that gates did not pass is signed with the rest."""
    when = moment()
    if signer is not None:
        record_all(checkout, store, built, signer, when, spdx=spdx)
    envelopes = {image.platform: signed_records(store, image) for image in built}
    for gates in forced if signer is not None else ():
        image = next(b for b in built if b.platform == gates.platform)
        ungated = _ungated(image, gates, reason, reference)
        known = envelopes[gates.platform]
        envelopes[gates.platform] = _with_ungated(store, image, known, ungated, signer, when)
    return EvidenceBundle(envelopes, signer, read_stamp(when.at))


def _with_ungated(
    store: Store,
    image: Built,
    known: Sequence[Envelope],
    ungated: Ungated,
    signer: Signer | None,
    when: Moment,
) -> list[Envelope]:
    """An image's statements with the ungated one, and a set that lists all of them."""
    # the same image may be ungated in one registry and gated in another
    folder, signers = _published(store, image, ungated.reference), [signer] if signer else []
    subject = (image.name, image.platform, image.digest)
    statement = make_statement(image.name, image.digest, UNGATED, ungated.model_dump(), when)
    every = [e for e in known if not is_set(e)]
    every.append(keep(store, folder, "ungated", statement, signers))
    named = set_statement(*subject, every, ungated.reason, when)
    return [*every, keep_set(store, folder, named, signers)]


def _published(store: Store, image: Built, reference: str) -> Path:
    """The folder of statements about one publish of an image, not about the image alone."""
    folder = evidence_folder(store, image.name, image.platform, image.digest)
    return folder / "published" / sha256_of(reference.encode()).removeprefix("sha256:")[:16]


def _ungated(image: Built, gates: GateState, reason: str, reference: str) -> Ungated:
    return Ungated(
        image=image.name,
        platform=image.platform,
        reference=reference,
        gates=gates.message,
        reason=reason,
    )
