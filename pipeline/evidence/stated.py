"""What a build leaves beside an image by itself: its statements, made once for the same inputs.

`stated.json` remembers from what the statements were made and who signed them all, so that a build
with nothing to do has nothing to state. It is a memory, no evidence: nobody verifies by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipeline import __version__
from pipeline.assemble.golden import read_golden
from pipeline.assemble.image import Built, code_digest
from pipeline.attest.envelope import SUFFIX
from pipeline.errors import StoreDamaged
from pipeline.evidence.evidence_set import folder_of
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.spec.checkout import Checkout
from pipeline.store.store import Store, read_own

if TYPE_CHECKING:
    from datetime import datetime

    from pipeline.attest.envelope import Envelope
    from pipeline.attest.keys import Signer
    from pipeline.attest.statement import Statement
    from pipeline.evidence.image import Recorded

FILE = "stated.json"
OF_NOBODY = "is of nobody, and cannot be found out again"


class Stated(Frozen):
    """The statements that lie beside an image."""

    inputs: Digest  # all that they were made from
    statements: list[str]
    signed_by: list[Digest]  # the keys that signed every one of them

    def is_whole(self, folder: Path) -> bool:
        return {"provenance", "evidence-set"} <= {*self.statements} and all(
            (folder / f"{name}{SUFFIX}").is_file() for name in self.statements
        )


def find_stated(checkout: Checkout, store: Store, built: Built) -> Stated | None:
    """The statements that lie there, if all do and they were made from the same."""
    folder = folder_of(store, built)
    try:
        found = Stated.model_validate_json(read_own(folder / FILE))
    except (OSError, StoreDamaged, ValidationError):
        return None
    if found.inputs != _inputs(checkout, store, built) or not found.is_whole(folder):
        return None
    return found


def state_image(
    checkout: Checkout, store: Store, built: Built, signers: Sequence[Signer]
) -> Stated:
    """State and sign all there is to say of an image; what says the same already stays."""
    from pipeline.attest.statement import moment
    from pipeline.evidence.image import record_image

    found = record_image(checkout, store, built, signers, moment())
    return _remember(checkout, store, built, found)


def _remember(checkout: Checkout, store: Store, built: Built, found: Sequence[Recorded]) -> Stated:
    stated = Stated(
        inputs=_inputs(checkout, store, built),
        statements=[each.name for each in found],
        signed_by=signed_by_all([each.envelope for each in found]),
    )
    data = canonical_json(stated.model_dump()) + b"\n"
    store.write(folder_of(store, built) / FILE, data)
    return stated


def signed_by_all(envelopes: Sequence[Envelope]) -> list[str]:
    """The keys whose signature is on every envelope, by their own word."""
    keys = [{s.key_id for s in e.signatures if s.key_id} for e in envelopes]
    return sorted(set.intersection(*keys)) if keys else []


def _inputs(checkout: Checkout, store: Store, built: Built) -> str:
    """The digest of all that the statements of an image are made from."""
    gates = store.image_folder(built.name, built.platform) / "gates.json"
    label = f"{built.name}.{built.plan.architecture}"
    golden = read_golden(checkout.golden_path).images.get(label)
    specs = {
        each.spec.name: [
            each.spec.model_dump(mode="json", by_alias=True),
            checkout.series(each.spec).model_dump(mode="json"),
        ]
        for each in built.plan.chain()
    }
    try:
        judged = sha256_of(read_own(gates))
    except FileNotFoundError:
        judged = None
    except StoreDamaged:
        judged = "damaged"  # whoever states the image anew says so, and what to do
    must_be = golden.digest if golden else None
    made_by = [code_digest(), __version__]
    return sha256_of(
        canonical_json([built.plan.key, built.digest, made_by, specs, must_be, judged])
    )


def sign_stated(checkout: Checkout, store: Store, built: Built, signer: Signer) -> dict[str, str]:
    """Sign the statements of an image if they still say what it is; which do not, and why.

    What can be found out again is compared with what is written, all but the time. One that is
    wrong, or cannot be judged, keeps the others from being signed: the set is theirs together.
    """
    from pipeline.attest.statement import moment, read_stamp
    from pipeline.evidence.evidence_set import NAME, readable
    from pipeline.evidence.image import image_statements, keep_all

    folder = folder_of(store, built)
    kept = readable(folder)
    true = image_statements(checkout, store, built, spdx="sbom-spdx" in kept)
    when = moment()
    wrong = _wrong(folder, built, kept, true, read_stamp(when.at))
    if not wrong:
        said = {name: e.statement for name, e in kept.items() if name in true}
        found = keep_all(store, built, said, [signer], when)
        _remember(checkout, store, built, [x for x in found if x.name in (*said, NAME)])
    return wrong


def _wrong(
    folder: Path,
    built: Built,
    kept: Mapping[str, Envelope],
    true: Mapping[str, Statement],
    now: datetime,
) -> dict[str, str]:
    """Statements that are not true of an image, or of which nobody here can tell."""
    from pipeline.evidence.evidence_set import NAME, set_statement

    found = dict.fromkeys(sorted(true.keys() - kept.keys()), "is missing")
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        name = path.name.removesuffix(SUFFIX)
        if name not in kept:
            found[name] = "cannot be read"
        elif name in true and true[name].core() != kept[name].statement.core():
            found[name] = "does not say what the image is"
        elif name in (*true, NAME) and not kept[name].statement.has_happened(now):
            found[name] = "is dated in the future"
        elif name not in (*true, NAME) and not kept[name].signatures:
            found[name] = OF_NOBODY
    every = set_statement(built.name, built.platform, built.digest, kept.values())
    if NAME in kept and kept[NAME].statement.core() != every.core():
        found[NAME] = "names other statements than are there"
    return found
