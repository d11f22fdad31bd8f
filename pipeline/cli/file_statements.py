"""Statements about files: those that verbs leave beside weights and hosts, and signed ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipeline.attest.envelope import SUFFIX, enclose, read_kept
from pipeline.attest.names import HOST_FACTS, KINDS
from pipeline.attest.predicates import check_predicate
from pipeline.attest.statement import Statement, make_statement, moment
from pipeline.cli.signing import Signing
from pipeline.errors import (
    DiskFull,
    RecordInvalid,
    SigningFailed,
    StoreUnwritable,
)
from pipeline.files import write_bytes
from pipeline.verify.artifact import open_file
from pipeline.weights.place import Place
from pipeline.weights.sign.record import record_path, verification_from, weights_statement

if TYPE_CHECKING:
    from pipeline.attest.keys import Signer


class LeftBeside(NamedTuple):
    """A statement beside a file, and whether it is signed."""

    file: str
    state: str


def leave_weights_statement(
    place: Place, signing: Signing, *, read: int, by_receipt: int, why: Sequence[str] = ()
) -> LeftBeside:
    """State the result of a fetch or a verify of a set, beside its files."""
    result = verification_from(files_read=read, files_by_receipt=by_receipt, why=why)
    return keep_beside(record_path(place), weights_statement(place, result), signing)


def show_statement(left: LeftBeside) -> None:
    """The line about a statement at the end of a verb."""
    click.echo(f"statement: {left.file}, {left.state}")


def without_statements(files: Sequence[Path]) -> tuple[Path, ...]:
    """The records among `records/*.json`, which also names the statements beside them."""
    return tuple(path for path in files if not path.name.endswith(".dsse.json"))


def leave_host_statement(path: Path, signing: Signing) -> LeftBeside:
    """State what a host is after a run, beside its record."""
    # slow to import, and weights have no facts
    from pipeline.host.facts.drift import read_facts
    from pipeline.host.facts.summary import summarise

    # beside the record, so that a copied folder of records carries its evidence
    target = path.with_name(f"{path.name}{SUFFIX}")
    try:
        summary = summarise(read_facts(path)).model_dump(mode="json")
    # a run of the playbook has changed hosts by now: its other statements are still written
    except RecordInvalid as error:
        return LeftBeside(str(target), f"not stated: {error}")
    digest = open_file(path).digest
    return keep_beside(
        target, make_statement(path.name, digest, HOST_FACTS, summary, moment()), signing
    )


def keep_beside(
    path: Path, statement: Statement, signing: Signing, *, is_all: bool = False
) -> LeftBeside:
    """Write a statement, but never over one that somebody else signed.

    The check behind it may have taken hours: that its statement cannot be signed or written is
    shown, and is not an error. Where the statement is all that was asked for, it must be written.
    """
    before = read_kept(path)
    # DSSE does not demand a key id: github.com/secure-systems-lab/dsse
    keys = [s.key_id or "a key without a name" for s in before.signatures] if before else []
    # our own statement is replaced, as what it describes has changed
    if keys and signing.key_id not in keys:
        return LeftBeside(str(path), f"left as it was, {signing.state(keys)}")
    try:
        envelope = enclose(statement, signing.signers)
        state = signing.state([signer.key_id for signer in signing.signers])
    except SigningFailed as error:
        envelope, state = enclose(statement), f"unsigned ({error})"
    try:
        write_bytes(path, envelope.dump())
    except (StoreUnwritable, DiskFull) as error:
        if is_all:
            raise
        return LeftBeside(str(path), f"not written: {error}")
    return LeftBeside(str(path), state)


def attest_file(artifact: Path, kind: str, body: Any, signer: Signer) -> Path:
    """Sign a statement of one of our own kinds about a file; where it is kept."""
    # before signing: a signature under nonsense cannot be taken back
    check_predicate(KINDS[kind], body)
    statement = make_statement(
        artifact.name, open_file(artifact).digest, KINDS[kind], body, moment()
    )
    path = artifact.with_name(f"{artifact.name}{SUFFIX}")
    write_bytes(path, enclose(statement, [signer]).dump())
    return path
