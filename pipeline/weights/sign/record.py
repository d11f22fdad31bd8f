"""What is said of a set for the chain of evidence: an in-toto statement, ready to be signed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline import __version__
from pipeline.attest.weights import Tool, Weights, WeightsLockName, WeightsVerification
from pipeline.model import Frozen, Hex, Identity, canonical_json, sha256_of
from pipeline.weights.check.verify import Request, verify
from pipeline.weights.disk.survey import Finding
from pipeline.weights.disk.vouched import look
from pipeline.weights.model import WeightsLock, dump
from pipeline.weights.place import Place

STATEMENT_TYPE: Literal["https://in-toto.io/Statement/v1"] = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Literal["urn:sm120-pipeline:predicate:weights:v1"] = (
    "urn:sm120-pipeline:predicate:weights:v1"
)


class Sha256(Frozen):
    """A digest as in-toto spells it."""

    sha256: Hex


class Subject(Frozen):
    """What the statement is about: the lock file, or the set of files it names."""

    name: Identity
    digest: Sha256


class Record(Frozen):
    """An in-toto Statement v1 about one set."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(
        default=STATEMENT_TYPE, validation_alias="_type", serialization_alias="_type"
    )
    subject: list[Subject] = Field(min_length=2, max_length=2)
    predicateType: Literal["urn:sm120-pipeline:predicate:weights:v1"] = PREDICATE_TYPE
    predicate: Weights


def record_path(place: Place) -> Path:
    """Where a set's statement lies."""
    return place.state / "record.dsse.json"


def set_digest(lock: WeightsLock) -> str:
    """The set as one number: SHA-256 of the canonical JSON list of path, size and hash."""
    rows = [[pin.path, pin.size_bytes, pin.want] for pin in lock.files]
    return sha256_of(canonical_json(rows))


def record(
    place: Place,
    neighbours: Collection[Place] = (),
    *,
    full: bool = False,
    now: datetime | None = None,
) -> Record:
    """The statement. Unless `full`, nothing is read: what no receipt vouches for is unknown."""
    return _record(place, (_full if full else _by_receipt)(place, neighbours, _stamp(now)))


def record_found(
    place: Place,
    *,
    files_read: int,
    files_by_receipt: int,
    why: Sequence[str] = (),
    now: datetime | None = None,
) -> Record:
    """The statement about what was just found out of all files of a set: whole, or why not."""
    found = WeightsVerification(
        result="damaged" if why else "verified",
        how="receipt" if files_by_receipt else "full",
        at=_stamp(now),
        files_read=files_read,
        files_by_receipt=files_by_receipt,
        why=list(why),
    )
    return _record(place, found)


def _stamp(now: datetime | None) -> str:
    return (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _record(place: Place, found: WeightsVerification) -> Record:
    lock = place.lock
    return Record(
        subject=[
            _subject(f"{lock.name}.lock.yaml", sha256_of(dump(lock).encode())),
            _subject(f"{lock.repository}@{lock.commit}", set_digest(lock)),
        ],
        predicate=Weights(
            lock=WeightsLockName(name=lock.name, seal=lock.seal, spec=lock.spec),
            repository=lock.repository,
            commit=lock.commit,
            files=len(lock.files),
            size_bytes=lock.size_bytes,
            layout="hub-cache" if place.hub_cache else "plain",
            verification=found,
            tool=Tool(name="sm120-pipeline", version=__version__),
        ),
    )


def _subject(name: str, digest: str) -> Subject:
    return Subject(name=name, digest=Sha256(sha256=digest.removeprefix("sha256:")))


def _full(place: Place, neighbours: Collection[Place], at: str) -> WeightsVerification:
    report = verify(place, Request(full=True), neighbours).report
    why = reasons(report.damage)
    return WeightsVerification(
        result="damaged" if why else "verified",
        how="full",
        at=at,
        files_read=report.files_read,
        files_by_receipt=0,
        why=why,
    )


def _by_receipt(place: Place, neighbours: Collection[Place], at: str) -> WeightsVerification:
    seen = look(place, neighbours)
    why = [_words(finding) for finding in seen.findings if finding.damage]
    result: Literal["verified", "damaged", "unknown"] = "damaged" if why else "verified"
    if seen.unknown:
        result = "damaged" if why else "unknown"
        first = seen.unknown[0].path
        why.append(f"no receipt vouches for {len(seen.unknown)} files, such as {first}")
    return WeightsVerification(
        result=result,
        how="receipt",
        at=at,
        files_read=0,
        files_by_receipt=len(seen.vouched),
        why=why,
    )


def reasons(findings: Iterable[Finding]) -> list[str]:
    """Findings as a statement lists them."""
    return [_words(finding) for finding in findings]


def _words(finding: Finding) -> str:
    return f"{finding.kind}: {finding.path} {finding.detail}".rstrip()


def as_json(statement: Record) -> dict[str, Any]:
    """As it is written and signed."""
    return statement.model_dump(by_alias=True, mode="json")


def schema() -> dict[str, Any]:
    """What such a record may hold; `record.schema.json` is this, for other programs."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": PREDICATE_TYPE,
        **Record.model_json_schema(by_alias=True, mode="serialization"),
    }
