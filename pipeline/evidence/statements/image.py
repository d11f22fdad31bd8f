"""States, signs and keeps all evidence of a built image and of its rebuild."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence

from pipeline import __version__
from pipeline.artifacts.attest.envelope import SUFFIX, Envelope
from pipeline.artifacts.attest.keys import Signer
from pipeline.artifacts.attest.names import BUILDER, CYCLONEDX, REBUILD, SPDX
from pipeline.artifacts.attest.predicates import DeclaredDifference, Rebuild
from pipeline.artifacts.attest.statement import Moment, Statement, make_statement, read_stamp
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.oci.document import read_document
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import StoreDamaged
from pipeline.core.known import Unknown
from pipeline.evidence.statements.bill import bill_of
from pipeline.evidence.statements.evidence_set import NAME as SET
from pipeline.evidence.statements.evidence_set import (
    keep_set,
    readable,
    set_statement,
    sign_and_keep,
    statements_folder,
)
from pipeline.evidence.statements.inventory import trees_of
from pipeline.evidence.statements.provenance import image_provenance
from pipeline.evidence.statements.results import gate_statements, run_statements
from pipeline.evidence.statements.sbom import cyclonedx
from pipeline.evidence.statements.sbom import spdx as spdx_bill
from pipeline.images.assemble.image import Built, code_digest
from pipeline.images.gate.evidence import read_evidence
from pipeline.images.gate.runs import read_runs
from pipeline.images.spec.checkout import Checkout


def image_statements(
    checkout: Checkout,
    store: Store,
    built: Built,
    when: Moment | None = None,
    *,
    spdx: bool = False,
) -> dict[str, Statement]:
    """All statements about an image by name: provenance, bill of materials, gate results, runs.

    A bill in SPDX repeats the one in CycloneDX and is as large: it is made on request only.
    """
    # before anything is signed: the record is a file of the store, which may have been changed
    layers = read_document(store.read_blob(built.digest)).layers
    if [x.digest for x in layers] != [x.record.digest for x in built.layers]:
        raise StoreDamaged(f"{built.name}: the store lists other layers than the manifest")
    trees = trees_of(store, built)
    bill = bill_of(checkout, store, built)
    subject = (built.name, built.digest)
    statements = {
        "provenance": image_provenance(checkout, built, when, trees),
        "sbom-cyclonedx": make_statement(*subject, CYCLONEDX, cyclonedx(bill), when),
    }
    if spdx:
        statements["sbom-spdx"] = make_statement(*subject, SPDX, spdx_bill(bill), when)
    if gates := read_evidence(store, built.name, built.platform, built.digest):
        statements |= {f"gate-{k}": v for k, v in gate_statements(gates, when).items()}
    runs = read_runs(store, built.name, built.platform, built.digest)
    return statements | run_statements(*subject, runs, when)


def record_image(
    checkout: Checkout,
    store: Store,
    built: Built,
    signers: Sequence[Signer],
    when: Moment | None = None,
    *,
    spdx: bool = False,
) -> dict[str, Envelope]:
    """State, sign and keep everything, the set last; return the envelopes by name."""
    with log.watched(f"Stating what {built.name} is made of"):
        statements = image_statements(checkout, store, built, when, spdx=spdx)
        return keep_all(store, built, statements, signers, when)


def keep_all(
    store: Store,
    built: Built,
    statements: Mapping[str, Statement],
    signers: Sequence[Signer],
    when: Moment | None = None,
) -> dict[str, Envelope]:
    """Keep statements beside those that are there, and the set of all of them."""
    folder = statements_folder(store, built)
    signed = {
        name: sign_and_keep(store, folder, name, s, signers) for name, s in statements.items()
    }
    subject = (built.name, built.platform, built.digest)
    # a build and a gate may state one image at the same time: the last set must list both's
    with store.locked(f"set-{folder.name}"):
        now = read_stamp(when.at) if when else None
        for name, envelope in readable(folder).items():
            # dated in the future and not stated again, it would break the set
            if now and name not in (*signed, SET) and not envelope.statement.has_happened(now):
                path = folder / f"{name}{SUFFIX}"
                path.unlink(missing_ok=True)
                log.say(f"{path.name} is dated in the future, by a wrong clock, and was removed")
        every = set_statement(*subject, readable(folder).values(), when=when)
        return {**signed, SET: keep_set(store, folder, every, signers)}


def record_rebuild(
    store: Store,
    first: Built,
    signer: Signer,
    difference: str,
    when: Moment,
    declared: Sequence[DeclaredDifference] = (),
) -> Envelope:
    """State, sign and keep a rebuild of an image; an empty difference means the same digest.

    With `declared` it gave another digest, and these are all the files that differ.
    """
    nothing = Unknown(unknown="there is none: the digests are equal")
    predicate = Rebuild(
        image=first.name,
        platform=first.platform,
        identical=not difference,
        difference=plain(difference) if difference else nothing,
        inputs=first.plan.key,
        builder=BUILDER,
        builder_version=__version__,
        builder_code=code_digest(),
        rebuilt_by=signer.key_id,
        claims="SLSA Build L1; a rebuild on one's own machine is no hosted builder",
        equivalent=list(declared) or None,
        machine=platform.machine() or None,
    )
    body = predicate.model_dump(mode="json", exclude_none=True)
    statement = make_statement(first.name, first.digest, REBUILD, body, when)
    # one file for each key, so that two people who rebuild do not replace each other's
    name = f"rebuild-{signer.key_id.removeprefix('sha256:')[:12]}"
    return keep_all(store, first, {name: statement}, [signer], when)[name]
