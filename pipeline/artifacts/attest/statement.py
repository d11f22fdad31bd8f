"""in-toto statements: a claim about bytes, named by digest. Equal findings give equal statements.

A statement keeps its time in one place: where the predicate's format defines one, else in
`sm120_recorded`. Without the time, two machines with the same findings write the same bytes.
https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.artifacts.attest.names import CYCLONEDX, PROVENANCE, SPDX, STATEMENT, WEIGHTS
from pipeline.artifacts.attest.strict import as_model, read_signed_json
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import Frozen, Hex, Identity, Stamp, canonical_json

RECORDED = "sm120_recorded"
# NTP keeps clocks within seconds; five minutes forgive a machine without it
CLOCKS_APART = timedelta(minutes=5)  # of machines that sign and machines that verify
_STAMP = "%Y-%m-%dT%H:%M:%SZ"

# Where each kind of predicate keeps its time.
_PLACES: dict[str, tuple[str, ...]] = {
    PROVENANCE: ("runDetails", "metadata", "finishedOn"),
    CYCLONEDX: ("metadata", "timestamp"),
    SPDX: ("creationInfo", "created"),
    WEIGHTS: ("verification", "at"),
}
# Beside the time: which run it was.
_RUNS = {PROVENANCE: "invocationId", None: "invocation"}


class DigestSet(Frozen):
    """The one hash that counts; a second, weaker one could be chosen instead."""

    sha256: Hex


class Subject(Frozen):
    """The artifact of a statement. The name is for people, the digest is compared."""

    name: Identity
    digest: DigestSet


class Statement(Frozen):
    """An in-toto Statement v1."""

    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: Annotated[list[Subject], Field(min_length=1, max_length=1000)]
    predicate_type: Identity = Field(alias="predicateType")
    predicate: dict[str, Any]

    def dump(self) -> bytes:
        """The bytes that get signed."""
        return canonical_json(self.as_json())

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def is_about(self, digest: str) -> bool:
        return any(f"sha256:{s.digest.sha256}" == digest for s in self.subject)

    def core(self) -> bytes:
        """The statement without its time and run: equal for equal findings."""
        *above, time = self._place
        # bills and weights have a place for the time and none for the run
        run = _RUNS.get(self.predicate_type if self.predicate_type in _PLACES else None)
        predicate = _without(self.predicate, above, {time, run})
        return self.model_copy(update={"predicate": predicate}).dump()

    @property
    def _place(self) -> tuple[str, ...]:
        return _PLACES.get(self.predicate_type, (RECORDED, "at"))

    @property
    def recorded(self) -> datetime | None:
        """When it was made, by its signer's own clock; none where it has no time."""
        value: Any = self.predicate
        for name in self._place:
            if not isinstance(value, dict):
                raise RecordInvalid(f"{name}: its parent is not a JSON object")
            value = value.get(name)
            if value is None:
                return None
        return read_stamp(value)

    def has_happened(self, now: datetime) -> bool:
        """Whether its time is not in the future; a statement without a time passes."""
        return self.recorded is None or self.recorded <= now + CLOCKS_APART


def _without(value: dict[str, Any], above: Sequence[str], names: set[str | None]) -> dict[str, Any]:
    """Copies a value without these names below some parents, and without parents left empty."""
    if not above:
        return {k: v for k, v in value.items() if k not in names}
    first, *deeper = above
    if not isinstance(value.get(first), dict):
        return value
    rest = _without(value[first], deeper, names)
    return {**value, first: rest} if rest else {k: v for k, v in value.items() if k != first}


class Moment(Frozen):
    """When and in which run something was recorded."""

    at: Stamp
    invocation: Identity


def moment(now: datetime | None = None) -> Moment:
    """This run, now."""
    return Moment(at=stamp(now or datetime.now(UTC)), invocation=f"urn:uuid:{uuid.uuid4()}")


def stamp(when: datetime | None = None) -> str:
    """A time as statements write it, now by default: UTC, whole seconds."""
    return (when or datetime.now(UTC)).astimezone(UTC).strftime(_STAMP)


def read_stamp(text: str) -> datetime:
    """The time that a stamp names."""
    try:
        # one spelling of each time, so that equal statements are equal bytes
        return datetime.strptime(text, _STAMP).replace(tzinfo=UTC)
    except (ValueError, TypeError) as error:
        raise RecordInvalid(f"{text!r}: is not a time like 2026-01-31T12:00:00Z") from error


def make_statement(
    name: str, digest: str, kind: str, predicate: Mapping[str, Any], when: Moment | None = None
) -> Statement:
    """A statement of a predicate type about one artifact."""
    return state_about([subject(name, digest)], kind, predicate, when)


def subject(name: str, digest: str) -> Subject:
    """An artifact as statements name it."""
    return Subject(name=name, digest=DigestSet(sha256=digest.removeprefix("sha256:")))


def state_about(
    subjects: Sequence[Subject],
    predicate_type: str,
    predicate: Mapping[str, Any],
    when: Moment | None = None,
) -> Statement:
    """Makes a statement about several artifacts; its time goes where the predicate keeps it."""
    body = dict(predicate)
    if when is not None and predicate_type == PROVENANCE:
        details = {"invocationId": when.invocation, "finishedOn": when.at}
        body["runDetails"] = {**body["runDetails"], "metadata": details}
    elif when is not None and predicate_type in _PLACES:
        first, last = _PLACES[predicate_type]
        body[first] = {**body[first], last: when.at}
    elif when is not None:
        body[RECORDED] = when.model_dump()
    return Statement(
        _type=STATEMENT, subject=list(subjects), predicateType=predicate_type, predicate=body
    )


def read_statement(data: bytes, what: str) -> Statement:
    """Reads a statement from bytes of unknown origin."""
    statement = as_model(Statement, read_signed_json(data, what), what, "the statement")
    _ = statement.recorded  # a time that cannot be read is refused here, not later
    return statement
