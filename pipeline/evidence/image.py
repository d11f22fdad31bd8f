"""All evidence that there is of a built image, stated, signed and kept beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.assemble.image import Built
from pipeline.assemble.plan import ImagePlan
from pipeline.attest.envelope import Envelope
from pipeline.attest.keys import Signer
from pipeline.attest.names import CYCLONEDX, SPDX
from pipeline.attest.statement import Moment, Statement, make_statement
from pipeline.errors import StoreDamaged
from pipeline.evidence.bill import bill_of
from pipeline.evidence.evidence_set import NAME as SET
from pipeline.evidence.evidence_set import evidence_folder, keep, keep_set, readable, set_statement
from pipeline.evidence.gates import gate_statements
from pipeline.evidence.provenance import image_provenance
from pipeline.evidence.sbom_cyclonedx import cyclonedx_bytes
from pipeline.evidence.sbom_spdx import spdx_bytes
from pipeline.gate.evidence import read_evidence
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store


@dataclass(frozen=True)
class Recorded:
    """An envelope and the name it is kept under."""

    name: str
    envelope: Envelope


def image_statements(
    checkout: Checkout,
    store: Store,
    plan: ImagePlan,
    built: Built,
    when: Moment | None = None,
    *,
    spdx: bool = False,
) -> dict[str, Statement]:
    """What can be said of an image, by name: its making, its parts, what its gates found.

    A bill in SPDX says what the one in CycloneDX says, and is as large: it is made on request.
    """
    _require_layers(store, built)
    bill = bill_of(checkout, store, plan, built)
    parts = json.loads(cyclonedx_bytes(bill))
    found = {
        "provenance": image_provenance(checkout, plan, built, when),
        "sbom-cyclonedx": make_statement(built.name, built.digest, CYCLONEDX, parts, when),
    }
    if spdx:
        parts = json.loads(spdx_bytes(bill))
        found["sbom-spdx"] = make_statement(built.name, built.digest, SPDX, parts, when)
    return found | gates_found(store, built, when)


def gates_found(store: Store, built: Built, when: Moment | None = None) -> dict[str, Statement]:
    """What the gates found of this very image, by name; nothing where they were not run."""
    gates = read_evidence(store, built.name, built.platform, built.digest)
    return {f"gate-{k}": v for k, v in gate_statements(gates, when).items()} if gates else {}


def _require_layers(store: Store, built: Built) -> None:
    """The manifest is what its digest says; what else the store says of the image must fit it."""
    layers = [x["digest"] for x in store.read_json(built.digest)["layers"]]
    if layers != [x.record.digest for x in built.layers]:
        raise StoreDamaged(f"{built.name}: the store says other layers than the image itself")


def record_image(
    checkout: Checkout,
    store: Store,
    plan: ImagePlan,
    built: Built,
    signers: Sequence[Signer],
    when: Moment | None = None,
    *,
    spdx: bool = False,
) -> list[Recorded]:
    """State, sign and keep everything, and last the set of it all."""
    said = image_statements(checkout, store, plan, built, when, spdx=spdx)
    return keep_all(store, built, said, signers, when)


def keep_all(
    store: Store,
    built: Built,
    said: Mapping[str, Statement],
    signers: Sequence[Signer],
    when: Moment | None = None,
) -> list[Recorded]:
    """Keep statements beside those that are there, and the set of all of them."""
    folder = evidence_folder(store, built.name, built.platform, built.digest)
    found = [Recorded(name, keep(store, folder, name, s, signers)) for name, s in said.items()]
    subject = (built.name, built.platform, built.digest)
    # a build and a gate may state the same image at once: the last set must name what both left
    with store.locked(f"set-{folder.name}"):
        every = set_statement(*subject, readable(folder).values(), when=when)
        return [*found, Recorded(SET, keep_set(store, folder, every, signers))]
