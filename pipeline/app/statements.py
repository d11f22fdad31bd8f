"""Statements about files: weights, host records, benchmarks, reports and any other file.

A statement is next to its file, signed where there is a key. The modules that only some of them
need are imported on use: a nightly scrub of weights loads no benchmarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.app.signing import Signing
from pipeline.artifacts.attest.envelope import SUFFIX, enclose, read_kept_envelope
from pipeline.artifacts.attest.names import HOST_FACTS, KINDS, TEST_RESULT
from pipeline.artifacts.attest.predicates import check_predicate
from pipeline.artifacts.attest.statement import (
    Statement,
    make_statement,
    moment,
    state_about,
    subject,
)
from pipeline.core.errors import DiskFull, RecordInvalid, SigningFailed, StoreUnwritable
from pipeline.core.files import write_bytes
from pipeline.evidence.verify.artifact import open_file
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign.record import verification_from, weights_record_path, weights_statement

if TYPE_CHECKING:
    from pipeline.artifacts.attest.keys import Signer
    from pipeline.images.gate.runs import ImageRun


class FileStatement(NamedTuple):
    """A statement next to a file, and whether it is signed."""

    file: str
    state: str


def keep_statement(
    path: Path, statement: Statement, signing: Signing, *, must_write: bool = False
) -> FileStatement:
    """Write a statement, but never over one that another key signed.

    The check that it describes may have taken hours: where the statement cannot be signed or
    written, the result says so, without an error. `must_write` is for a caller that was asked for
    nothing but the statement.
    """
    before = read_kept_envelope(path)
    # DSSE does not demand a key id: github.com/secure-systems-lab/dsse
    keys = [s.key_id or "a key without a name" for s in before.signatures] if before else []
    # our own statement is replaced, as what it describes has changed
    if keys and signing.key_id not in keys:
        return FileStatement(str(path), f"left as it was, {signing.state(keys)}")
    try:
        envelope = enclose(statement, signing.signers)
        state = signing.state([signer.key_id for signer in signing.signers])
    except SigningFailed as error:
        envelope, state = enclose(statement), f"unsigned ({error})"
    try:
        write_bytes(path, envelope.dump())
    except (StoreUnwritable, DiskFull) as error:
        if must_write:
            raise
        return FileStatement(str(path), f"not written: {error}")
    return FileStatement(str(path), state)


def state_run(
    folder: Path, files: Mapping[str, str], run: ImageRun, signing: Signing
) -> FileStatement:
    """State a run without a known image, by its result's files, next to the first file."""
    from pipeline.evidence.statements.results import run_predicate

    subjects = [subject(name, digest) for name, digest in files.items()]
    statement = state_about(subjects, TEST_RESULT, run_predicate(run), moment())
    return keep_statement(folder / f"{next(iter(files))}{SUFFIX}", statement, signing)


def state_weights(
    place: LockedFolder, signing: Signing, *, read: int, by_receipt: int, why: Sequence[str] = ()
) -> FileStatement:
    """State the result of a fetch or a verify of a set, next to its files."""
    result = verification_from(files_read=read, files_by_receipt=by_receipt, why=why)
    return keep_statement(weights_record_path(place), weights_statement(place, result), signing)


def state_host(path: Path, signing: Signing) -> FileStatement:
    """State what a host is after a run, next to its record."""
    from pipeline.hosts.facts.drift import read_recorded_facts
    from pipeline.hosts.facts.summary import summarise

    # next to the record, so that a copied folder of records carries its evidence
    target = path.with_name(f"{path.name}{SUFFIX}")
    try:
        summary = summarise(read_recorded_facts(path)).model_dump(mode="json")
    # the playbook has changed hosts by now: still write the other hosts' statements
    except RecordInvalid as error:
        return FileStatement(str(target), f"not stated: {error}")
    digest = open_file(path).digest
    statement = make_statement(path.name, digest, HOST_FACTS, summary, moment())
    return keep_statement(target, statement, signing)


def state_benchmark(folder: Path, signing: Signing, *, must_write: bool = False) -> FileStatement:
    """State a benchmark with all of its values, next to its result."""
    from pipeline.serving.bench.place import RUN_FILE
    from pipeline.serving.bench.results.recompute import benchmark_statement

    statement = benchmark_statement(folder, moment())
    path = folder / f"{RUN_FILE}{SUFFIX}"
    return keep_statement(path, statement, signing, must_write=must_write)


def sign_file(artifact: Path, kind: str, body: Any, signer: Signer) -> Path:
    """Sign a statement of one of our own kinds about a file; returns where it is."""
    # before signing: a signature under nonsense cannot be taken back
    check_predicate(KINDS[kind], body)
    statement = make_statement(
        artifact.name, open_file(artifact).digest, KINDS[kind], body, moment()
    )
    path = artifact.with_name(f"{artifact.name}{SUFFIX}")
    write_bytes(path, enclose(statement, [signer]).dump())
    return path


def without_statements(files: Sequence[Path]) -> tuple[Path, ...]:
    """Drop the statements from `records/*.json`, which matches them too."""
    return tuple(path for path in files if not path.name.endswith(".dsse.json"))
