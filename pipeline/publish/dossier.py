"""What is signed of an image when it is published: kept statements, or new ones where a key is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.build.image import Built
from pipeline.keys import Signer
from pipeline.publish.evidence import Dossier
from pipeline.publish.gates import GateState
from pipeline.record.envelope import Envelope, enclose, read_envelope
from pipeline.record.names import SPDX, UNGATED
from pipeline.record.shelf import kept
from pipeline.record.statement import Moment, moment, read_stamp, state
from pipeline.store.store import Store
from pipeline.wish.load import Checkout


def record_all(
    checkout: Checkout, store: Store, built: Sequence[Built], signer: Signer, when: Moment
) -> None:
    """State and sign what is not; what says the same and has this signature stays as it is."""
    # half of the time it takes to start: only who signs pays for it
    from pipeline.build.plan import plan_image
    from pipeline.record.image import record_image

    for image in built:
        plan = plan_image(checkout, image.name, image.platform)
        record_image(checkout, store, plan, image, [signer], when)


def signed_records(store: Store, image: Built) -> list[Envelope]:
    """The statements of an image that somebody signed; a damaged file ends it, named."""
    found = kept(store, image.name, image.platform, image.digest)
    envelopes = [read_envelope(path.read_bytes(), path.name) for path in found]
    return [e for e in envelopes if e.signatures and e.statement.is_about(image.digest)]


def make_dossier(
    checkout: Checkout,
    store: Store,
    built: Sequence[Built],
    signer: Signer | None,
    forced: Sequence[GateState],
    reason: str,
    reference: str,
    *,
    spdx: bool = False,
) -> Dossier:
    """All evidence for a publish; that gates were passed over is signed with the rest.

    A bill in SPDX says what the one in CycloneDX says, and is as large: it goes along on request.
    """
    when = moment()
    if signer is not None:
        record_all(checkout, store, built, signer, when)
    envelopes = {
        image.platform: [e for e in signed_records(store, image) if spdx or not _is_spdx(e)]
        for image in built
    }
    for gates in forced if signer is not None else ():
        image = next(b for b in built if b.platform == gates.platform)
        said = _ungated(image, gates, reason, reference)
        statement = state(image.name, image.digest, UNGATED, said, when)
        envelopes[gates.platform].append(enclose(statement, [signer] if signer else []))
    return Dossier(envelopes, signer, read_stamp(when.at))


def _is_spdx(envelope: Envelope) -> bool:
    return envelope.statement.predicate_type == SPDX


def _ungated(image: Built, gates: GateState, reason: str, reference: str) -> dict[str, Any]:
    from pipeline.record.predicates import Ungated

    said = Ungated(
        image=image.name,
        platform=image.platform,
        reference=reference,
        gates=gates.words,
        reason=reason,
    )
    return said.model_dump()
