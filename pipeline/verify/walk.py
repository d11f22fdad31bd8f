"""The walk from an artifact back to every byte: signature, subject, materials. Needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.errors import RecordInvalid
from pipeline.record.envelope import Envelope
from pipeline.record.names import (
    CYCLONEDX,
    PROVENANCE,
    REBUILD,
    SPDX,
    TEST_RESULT,
    UNGATED,
    WEIGHTS,
    kind_of,
)
from pipeline.record.predicates import Rebuild, Unknown, check_predicate
from pipeline.record.statement import RECORDED, Statement
from pipeline.record.trust import Trust, TrustedKey
from pipeline.verify.artifact import Artifact
from pipeline.verify.bills import judge_bill
from pipeline.verify.evidence import Exhibit
from pipeline.verify.materials import judge_materials
from pipeline.verify.provenance import Provenance, read_provenance
from pipeline.verify.results import TestResult, judge_tests, read_test_result
from pipeline.verify.signature import judge_signatures
from pipeline.verify.verdict import Node, Verdict, worst
from pipeline.weights.predicate import Weights
from pipeline.wish.load import Checkout


@dataclass(frozen=True)
class Believed:
    """A statement about this artifact that a trusted key made."""

    name: str
    statement: Statement
    keys: tuple[TrustedKey, ...]

    @property
    def kind(self) -> str:
        return kind_of(self.statement.predicate_type)

    @property
    def test(self) -> TestResult | None:
        """What a gate found, where this is a gate's result and can be read."""
        if self.statement.predicate_type != TEST_RESULT:
            return None
        try:
            return read_test_result(self.statement.predicate)
        except RecordInvalid:
            return None


@dataclass(frozen=True)
class Walk:
    """What was found on the way."""

    node: Node
    believed: tuple[Believed, ...]


@dataclass(frozen=True)
class _Opened:
    """An envelope whose signatures and subject were judged."""

    exhibit: Exhibit
    envelope: Envelope
    checks: tuple[Node, ...]
    keys: tuple[TrustedKey, ...]
    trust: Trust | None

    @property
    def is_about_this(self) -> bool:
        return worst(c.verdict for c in self.checks) is not Verdict.BROKEN

    @property
    def is_believed(self) -> bool:
        return bool(self.keys) and self.is_about_this


def walk(
    artifact: Artifact,
    exhibits: Sequence[Exhibit],
    trust: Trust | None,
    checkout: Checkout | None,
    now: datetime,
) -> Walk:
    """All evidence of an artifact, judged."""
    title = f"{artifact.title} {artifact.digest}"
    if not exhibits:
        return Walk(Node(title, Verdict.UNSIGNED, "there is no evidence of it"), ())
    opened = [_open(x, artifact, trust, now) for x in sorted(exhibits, key=_is_secondary)]
    made = _provenance(opened)
    nodes = [x if isinstance(x, Node) else _judge(x, artifact, made, checkout, now) for x in opened]
    believed = tuple(
        Believed(x.exhibit.name, x.envelope.statement, x.keys)
        for x in opened
        if isinstance(x, _Opened) and x.is_believed
    )
    if artifact.is_image:
        nodes += _missing(believed, made)
    return Walk(Node(title, children=tuple(nodes)), believed)


def _is_secondary(exhibit: Exhibit) -> bool:
    """Provenance comes first: the rest is read in its light."""
    found = exhibit.envelope
    return found is None or found.statement.predicate_type != PROVENANCE


def _open(
    exhibit: Exhibit, artifact: Artifact, trust: Trust | None, now: datetime
) -> _Opened | Node:
    envelope = exhibit.envelope
    if envelope is None:
        return Node(exhibit.name, Verdict.BROKEN, exhibit.error)
    signature, keys = judge_signatures(envelope, trust, now)
    checks = (signature, _subject(envelope, artifact))
    return _Opened(exhibit, envelope, checks, tuple(keys), trust)


def _subject(envelope: Envelope, artifact: Artifact) -> Node:
    if envelope.statement.is_about(artifact.digest):
        return Node("subject", words="these very bytes")
    other = envelope.statement.subject[0]
    words = f"is about {other.name} sha256:{other.digest.sha256}, not about this"
    return Node("subject", Verdict.BROKEN, words)


def _provenance(opened: Sequence[_Opened | Node]) -> Provenance | None:
    """The first provenance that is believed."""
    for each in opened:
        if isinstance(each, _Opened) and each.is_believed:
            statement = each.envelope.statement
            if statement.predicate_type == PROVENANCE:
                try:
                    return read_provenance(statement.predicate)
                except RecordInvalid:
                    continue
    return None


def _judge(
    opened: _Opened,
    artifact: Artifact,
    made: Provenance | None,
    checkout: Checkout | None,
    now: datetime,
) -> Node:
    """An envelope's node: what stands in it is only looked at when it speaks of this artifact."""
    statement = opened.envelope.statement
    title = f"{kind_of(statement.predicate_type)} ({opened.exhibit.name})"
    if not opened.is_about_this:
        return Node(title, children=opened.checks)
    try:
        said = _content(opened, statement, artifact, made, checkout)
    except RecordInvalid as error:
        said = (Node("predicate", Verdict.BROKEN, str(error)),)
    return Node(title, children=(*opened.checks, *said))


def _content(
    opened: _Opened,
    statement: Statement,
    artifact: Artifact,
    made: Provenance | None,
    checkout: Checkout | None,
) -> tuple[Node, ...]:
    kind, predicate = statement.predicate_type, statement.predicate
    if kind == PROVENANCE:
        return judge_materials(read_provenance(predicate), artifact, checkout, opened.trust)
    if kind == TEST_RESULT:
        image = made.definition.external.image if made else None
        return (judge_tests(read_test_result(predicate), image, checkout),)
    if kind in (CYCLONEDX, SPDX):
        return (judge_bill(kind, predicate, made),)
    check_predicate(kind, predicate)
    if kind == WEIGHTS:
        return (_weights(predicate),)
    if kind == UNGATED:
        words = f"published although its gates had not passed: {predicate['reason']}"
        return (Node("ungated", Verdict.INCOMPLETE, words),)
    return (_rebuild(opened, predicate, artifact),) if kind == REBUILD else ()


def _weights(predicate: dict[str, Any]) -> Node:
    found = Weights.model_validate(predicate).verification
    title = f"weights, {found.how}"
    if found.result == "verified":
        return Node(title, words=f"verified at {found.at}")
    verdict = Verdict.BROKEN if found.result == "damaged" else Verdict.INCOMPLETE
    return Node(title, verdict, f"{found.result}: {'; '.join(found.why) or 'no reason given'}")


def _rebuild(opened: _Opened, predicate: dict[str, Any], artifact: Artifact) -> Node:
    body = {k: v for k, v in predicate.items() if k != RECORDED}
    found = Rebuild.model_validate(body)
    if not found.identical:
        return Node("rebuild", Verdict.BROKEN, "came out different")
    if not isinstance(found.difference, Unknown):
        return Node("rebuild", Verdict.BROKEN, "calls itself identical and names a difference")
    notes = artifact.notes
    said = notes.get("org.opencontainers.image.title"), notes.get("sm120.inputs")
    if said != (found.image, found.inputs):
        return Node("rebuild", Verdict.BROKEN, "was of other inputs than the manifest names")
    if opened.keys and found.rebuilt_by not in {key.id for key in opened.keys}:
        words = f"says that {found.rebuilt_by} made it, who did not sign it"
        return Node("rebuild", Verdict.BROKEN, words)
    return Node("rebuild", words=f"the same digest again, by {found.rebuilt_by[:19]}…")


def _missing(believed: Sequence[Believed], made: Provenance | None) -> list[Node]:
    """Evidence that an image must have and this one has not."""
    if not believed:
        return []  # unsigned or broken already, and said so
    if made is None:
        return [Node("provenance", Verdict.INCOMPLETE, "nothing says what it was made of")]
    external = made.definition.external
    wanted = external.images[external.image].gates
    found = {b.test.gate for b in believed if b.test}
    return [
        Node(f"gate {gate}", Verdict.INCOMPLETE, "is wished for, but no result is recorded")
        for gate in wanted
        if gate not in found
    ]
