"""The statements that a build leaves beside an image, made once for the same inputs.

`stated.json` remembers which inputs they were made from and which keys signed all of them, so that
a build with nothing to do states nothing. It is a cache, not evidence: no verifier reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipeline import __version__
from pipeline.artifacts.attest.envelope import SUFFIX, Envelope
from pipeline.artifacts.attest.statement import CLOCKS_APART, moment, read_stamp, stamp
from pipeline.artifacts.store.store import Store, read_own
from pipeline.core.errors import StoreDamaged
from pipeline.core.model import Digest, Frozen, Stamp, canonical_json, sha256_of
from pipeline.evidence.statements.evidence_set import (
    NAME,
    readable,
    set_statement,
    statements_folder,
)
from pipeline.evidence.statements.inventory import trees_of
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.image import Built, code_digest
from pipeline.images.gate.runs import FILE as RUNS
from pipeline.images.spec.checkout import Checkout

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer

FILE = "stated.json"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)  # of a statement without a time


class SigningProblem(Enum):
    """Why a statement is not signed; the value is for people."""

    MISSING = "is missing"
    UNREADABLE = "cannot be read"
    OTHER = "does not match the image"
    AHEAD = "is dated in the future"
    UNSIGNED_FOREIGN = "is unsigned, and cannot be checked against the image"
    OTHER_SET = "lists other statements than there are"


class Stated(Frozen):
    """The statements beside an image."""

    inputs: Digest  # all that they were made from
    statements: list[str]
    signed_by: list[Digest]  # the keys that signed every one of them
    latest: Stamp  # when the last of them was stated


def find_stated(checkout: Checkout, store: Store, built: Built) -> Stated | None:
    """The statements beside an image, if all are there, of the same inputs, and not of the future.

    No verifier believes what was stated while a clock was ahead: the next build states it again.
    """
    folder = statements_folder(store, built)
    try:
        stated = Stated.model_validate_json(read_own(folder / FILE))
    except (OSError, StoreDamaged, ValidationError):
        return None
    is_past = read_stamp(stated.latest) <= datetime.now(UTC) + CLOCKS_APART
    is_same = is_past and stated.inputs == _inputs(checkout, store, built)
    # a memory that lists nothing must not pass for `all there`
    is_whole = {"provenance", NAME} <= {*stated.statements} and all(
        (folder / f"{name}{SUFFIX}").is_file() for name in stated.statements
    )
    return stated if is_same and is_whole else None


def state_image(
    checkout: Checkout, store: Store, built: Built, signers: Sequence[Signer]
) -> Stated:
    """State and sign everything about an image; an equal statement that is there stays."""
    from pipeline.evidence.statements.image import (
        record_image,  # slow to load; most builds state nothing
    )

    # a bill in SPDX that was asked for once is stated again with the rest
    has_spdx = (statements_folder(store, built) / f"sbom-spdx{SUFFIX}").is_file()
    recorded = record_image(checkout, store, built, signers, moment(), spdx=has_spdx)
    return _remember(checkout, store, built, recorded)


def _remember(
    checkout: Checkout, store: Store, built: Built, recorded: Mapping[str, Envelope]
) -> Stated:
    # the keys that every envelope names; the signatures are not checked
    keys = [{s.key_id for s in e.signatures if s.key_id} for e in recorded.values()]
    stated = Stated(
        inputs=_inputs(checkout, store, built),
        statements=list(recorded),
        signed_by=sorted(set.intersection(*keys)) if keys else [],
        latest=max(stamp(e.statement.recorded or _EPOCH) for e in recorded.values()),
    )
    store.write(statements_folder(store, built) / FILE, canonical_json(stated.model_dump()) + b"\n")
    return stated


def _inputs(checkout: Checkout, store: Store, built: Built) -> str:
    """The digest of all that the statements of an image are made from."""
    golden = read_golden(checkout.golden_path).images.get(f"{built.name}.{built.plan.architecture}")
    specs = {
        each.spec.name: [each.spec.dumped(), checkout.series(each.spec).model_dump(mode="json")]
        for each in built.plan.chain()
    }
    folder = store.image_folder(built.name, built.platform)
    judged, runs = _kept_digest(folder / "gates.json"), _kept_digest(folder / RUNS)
    # the golden digest is stated, so a new one makes the statements out of date
    must_be = golden.digest if golden else None
    # the builder is part of the provenance
    made_by = [code_digest(), __version__]
    inputs: list[object] = [built.plan.key, built.digest, made_by, specs, must_be, judged]
    if runs:
        inputs.append(runs)
    if trees := trees_of(store, built):
        inputs.append([tree.made.model_dump(mode="json", exclude_none=True) for tree in trees])
    return sha256_of(canonical_json(inputs))


def _kept_digest(path: Path) -> str | None:
    """The digest of results beside the image; they may come later than the build."""
    try:
        return sha256_of(read_own(path))
    except FileNotFoundError:
        return None
    except StoreDamaged:
        return "damaged"  # reported, with what to do, when the image is stated again


def sign_stated(
    checkout: Checkout, store: Store, built: Built, signer: Signer
) -> dict[str, SigningProblem]:
    """Sign the statements of an image if they still match it; names those that do not.

    Makes each again where it can, and compares all but the time with the kept one. If one is
    wrong, or cannot be judged, it signs none: they share one set.
    """
    from pipeline.evidence.statements.image import image_statements, keep_all

    folder = statements_folder(store, built)
    stored = readable(folder)
    true = image_statements(checkout, store, built, spdx="sbom-spdx" in stored)
    when = moment()
    problems = dict.fromkeys(sorted(true.keys() - stored.keys()), SigningProblem.MISSING)
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        name = path.name.removesuffix(SUFFIX)
        is_ours = name in (*true, NAME)
        if name not in stored:
            problems[name] = SigningProblem.UNREADABLE
        elif name in true and true[name].core() != stored[name].statement.core():
            problems[name] = SigningProblem.OTHER
        elif is_ours and not stored[name].statement.has_happened(read_stamp(when.at)):
            problems[name] = SigningProblem.AHEAD
        # a rebuild by another user is signed; an unsigned statement may be planted
        elif not is_ours and not stored[name].signatures:
            problems[name] = SigningProblem.UNSIGNED_FOREIGN
    every = set_statement(built.name, built.platform, built.digest, stored.values())
    if NAME in stored and stored[NAME].statement.core() != every.core():
        problems[NAME] = SigningProblem.OTHER_SET
    if not problems:
        # the kept ones, with the times at which they were made
        statements = {name: e.statement for name, e in stored.items() if name in true}
        _remember(checkout, store, built, keep_all(store, built, statements, [signer], when))
    return problems
