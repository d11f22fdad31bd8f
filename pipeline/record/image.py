"""All evidence that there is of a built image, stated, signed and kept beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.build.image import Built
from pipeline.build.plan import ImagePlan
from pipeline.gate.evidence import read_evidence
from pipeline.keys import Signer
from pipeline.record.bill import bill_of
from pipeline.record.envelope import Envelope
from pipeline.record.gates import gate_statements
from pipeline.record.names import CYCLONEDX, SPDX
from pipeline.record.provenance import image_provenance
from pipeline.record.sbom_cyclonedx import cyclonedx_bytes
from pipeline.record.sbom_spdx import spdx_bytes
from pipeline.record.shelf import keep, shelf
from pipeline.record.statement import Moment, Statement, state
from pipeline.store.store import Store
from pipeline.wish.load import Checkout


@dataclass(frozen=True)
class Recorded:
    """An envelope and the name it is kept under."""

    name: str
    envelope: Envelope


def image_statements(
    checkout: Checkout, store: Store, plan: ImagePlan, built: Built, when: Moment | None = None
) -> dict[str, Statement]:
    """What can be said of an image, by name: its making, its parts, what its gates found."""
    bill = bill_of(checkout, store, plan, built)
    parts = json.loads(cyclonedx_bytes(bill))
    found = {
        "provenance": image_provenance(checkout, plan, built, when),
        "sbom-cyclonedx": state(built.name, built.digest, CYCLONEDX, parts, when),
        "sbom-spdx": state(built.name, built.digest, SPDX, json.loads(spdx_bytes(bill)), when),
    }
    gates = read_evidence(store, built.name, built.platform, built.digest)
    if gates is not None:
        found |= {f"gate-{k}": v for k, v in gate_statements(gates, when).items()}
    return found


def record_image(
    checkout: Checkout,
    store: Store,
    plan: ImagePlan,
    built: Built,
    signers: Sequence[Signer],
    when: Moment | None = None,
) -> list[Recorded]:
    """State, sign and keep everything."""
    folder = shelf(store, built.name, built.platform, built.digest)
    said = image_statements(checkout, store, plan, built, when)
    return [Recorded(name, keep(store, folder, name, s, signers)) for name, s in said.items()]
