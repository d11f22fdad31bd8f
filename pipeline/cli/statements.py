"""What the stages leave by themselves: a statement beside each artifact, and a line about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipeline import log
from pipeline.cli.signing import Signing
from pipeline.errors import (
    DiskFull,
    PipelineError,
    RecordInvalid,
    SigningFailed,
    StoreUnwritable,
)

if TYPE_CHECKING:
    from pipeline.assemble.image import Built
    from pipeline.assemble.plan import ImagePlan
    from pipeline.attest.keys import Signer
    from pipeline.attest.statement import Statement
    from pipeline.evidence.stated import Stated
    from pipeline.spec.checkout import Checkout
    from pipeline.store.store import Store
    from pipeline.weights.place import Place


class LeftBeside(NamedTuple):
    """A statement beside a file, and whether it is signed."""

    file: str
    state: str


@dataclass(frozen=True)
class Left:
    """The statements beside an image, as a command's end names them."""

    image: str
    folder: Path
    stated: Stated

    def words(self, signing: Signing) -> str:
        return signing.words(self.stated.signed_by)

    def row(self, signing: Signing) -> list[str]:
        names = ", ".join(self.stated.statements)
        return [self.image, self.words(signing), names, str(self.folder)]

    def as_json(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.stated.model_dump(exclude={"inputs"})}


def leave_statements(
    checkout: Checkout,
    store: Store,
    images: Iterable[Built],
    signing: Signing,
) -> dict[Built, Left]:
    """State every image of which something new can be said, or whose statements lack our key."""
    from pipeline.evidence.evidence_set import folder_of
    from pipeline.evidence.stated import find_stated, state_image

    found = {}
    for built in images:
        stated = find_stated(checkout, store, built)
        if stated is None or _can_sign(stated, signing):
            stated = state_image(checkout, store, built, signing.signers)
        found[built] = Left(built.name, folder_of(store, built), stated)
    return found


def _can_sign(stated: Stated, signing: Signing) -> bool:
    return signing.key_id not in (None, *stated.signed_by) and bool(signing.signers)


def evidence_table(left: Iterable[Left], signing: Signing) -> str:
    """Which statements lie where, and who signed them."""
    return log.table(["image", "evidence", "statements", "in"], [x.row(signing) for x in left])


def leave_gate_statements(
    checkout: Checkout, store: Store, plan: ImagePlan, signing: Signing
) -> None:
    """State what a gate just found of an image, good or bad."""
    from pipeline.assemble.image import find_built

    built = find_built(store, plan)
    if built is None:
        return
    (left,) = leave_statements(checkout, store, [built], signing).values()
    log.say(f"{left.folder}: {len(left.stated.statements)} statements, {left.words(signing)}")


def sign_store(checkout: Checkout, store: Store, signer: Signer) -> Iterator[str]:
    """Sign what the store holds of this checkout's images; a line of each."""
    for name in checkout.images():
        for platform in checkout.spec(name).platforms:
            if store.image_record(name, platform) is not None:
                yield f"{name} for {platform}: {_signed(checkout, store, name, platform, signer)}"


def _signed(checkout: Checkout, store: Store, name: str, platform: str, signer: Signer) -> str:
    from pipeline.assemble.image import find_built
    from pipeline.assemble.plan import plan_image
    from pipeline.attest.strict import plain
    from pipeline.evidence.evidence_set import folder_of
    from pipeline.evidence.stated import OF_NOBODY, sign_stated, state_image

    try:
        plan = plan_image(checkout, name, platform)
        built = find_built(store, plan)
        if built is None:
            return f"not signed: it is not what the checkout describes (`sm120 build {name}`)"
        with store.in_use():
            if not folder_of(store, built).is_dir():
                stated = state_image(checkout, store, built, [signer])
                return f"{len(stated.statements)} statements made and signed"
            wrong = sign_stated(checkout, store, built, signer)
    except PipelineError as error:
        return f"not signed: {error}"
    if not wrong:
        return "its statements are signed"
    first, why = next(iter(wrong.items()))
    fix = f"`sm120 record {name}` states it anew"
    if why == OF_NOBODY:
        fix = f"look at it in {folder_of(store, built)}, and remove it there"
    return f"not signed: {plain(first)} {why} ({fix})".replace("\n", " ")


def leave_weights_statement(
    place: Place, signing: Signing, *, read: int, by_receipt: int, why: Sequence[str] = ()
) -> LeftBeside:
    """State what a fetch or a verify has just found of a set, beside its files."""
    from pipeline.weights.sign.record import record_path, verification_from, weights_statement

    result = verification_from(files_read=read, files_by_receipt=by_receipt, why=why)
    return _keep_beside(record_path(place), weights_statement(place, result), signing)


def say_statement(said: LeftBeside) -> None:
    """The line about a statement that a command ends with."""
    click.echo(f"statement: {said.file}, {said.state}")


def without_statements(files: Sequence[Path]) -> tuple[Path, ...]:
    """The records among `records/*.json`, which also names the statements beside them."""
    return tuple(path for path in files if not path.name.endswith(".dsse.json"))


def leave_host_statement(path: Path, signing: Signing) -> LeftBeside:
    """State what a host is after a run, beside its record."""
    from pipeline.attest.envelope import SUFFIX
    from pipeline.attest.names import HOST_FACTS
    from pipeline.attest.statement import make_statement, moment
    from pipeline.host.facts.drift import read_facts
    from pipeline.host.facts.summary import summarise
    from pipeline.verify.artifact import open_file

    target = path.with_name(f"{path.name}{SUFFIX}")
    try:
        summary = summarise(read_facts(path)).model_dump(mode="json")
    except RecordInvalid as error:
        return LeftBeside(str(target), f"not stated: {error}")
    digest = open_file(path).digest
    return _keep_beside(
        target, make_statement(path.name, digest, HOST_FACTS, summary, moment()), signing
    )


def _keep_beside(path: Path, statement: Statement, signing: Signing) -> LeftBeside:
    """Write a statement, but never over one that somebody else signed.

    What was found took hours, perhaps: that it cannot be signed or written does not hide it.
    """
    from pipeline.attest.envelope import enclose, read_kept
    from pipeline.files import write_bytes

    before = read_kept(path)
    keys = [s.key_id or "a key without a name" for s in before.signatures] if before else []
    if keys and signing.key_id not in keys:
        return LeftBeside(str(path), f"left as it was, {signing.words(keys)}")
    try:
        envelope = enclose(statement, signing.signers)
        state = signing.words([signer.key_id for signer in signing.signers])
    except SigningFailed as error:
        envelope, state = enclose(statement), f"unsigned ({error})"
    try:
        write_bytes(path, envelope.dump())
    except (StoreUnwritable, DiskFull) as error:
        return LeftBeside(str(path), f"not written: {error}")
    return LeftBeside(str(path), state)
