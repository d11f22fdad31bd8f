"""The walk from an artifact back to every byte: signature, subject, materials. Needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.attest.envelope import Envelope
from pipeline.attest.names import (
    CYCLONEDX,
    PROVENANCE,
    REBUILD,
    SPDX,
    TEST_RESULT,
    UNGATED,
    WEIGHTS,
    kind_of,
)
from pipeline.attest.predicates import Rebuild, Weights, check_predicate
from pipeline.attest.statement import RECORDED, Statement
from pipeline.attest.trust import Trust
from pipeline.errors import RecordInvalid
from pipeline.evidence.gate_result import read_test_result
from pipeline.evidence.provenance import Provenance, read_provenance
from pipeline.known import Unknown
from pipeline.spec.checkout import Checkout
from pipeline.verify.artifact import Artifact
from pipeline.verify.bills import judge_bill
from pipeline.verify.evidence import EvidenceItem, distinct
from pipeline.verify.materials import judge_materials
from pipeline.verify.opened import Believed, Opened
from pipeline.verify.results import judge_tests
from pipeline.verify.sets import SetJudge
from pipeline.verify.signature import judge_signatures
from pipeline.verify.verdict import Node, Verdict


@dataclass(frozen=True)
class Walk:
    """What was found on the way."""

    node: Node
    believed: tuple[Believed, ...]
    sets: frozenset[str] = frozenset()  # digests of the believed sets, also of older ones


def walk(
    artifact: Artifact,
    items: Sequence[EvidenceItem],
    trust: Trust | None,
    checkout: Checkout | None,
    now: datetime,
    *,
    gates_may_wait: bool = False,
) -> Walk:
    """All evidence of an artifact, judged.

    `gates_may_wait`: an image that was built here and is not published yet. That its gates have
    not run is shown; a result of theirs that was taken away is still found out by the set.
    """
    title = f"{artifact.title} {artifact.digest}"
    if not items:
        return Walk(Node(title, Verdict.INCOMPLETE, "there is no evidence of it"), ())
    ordered = sorted(distinct(items), key=_is_secondary)
    opened = [_open(x, artifact, trust, now) for x in ordered]
    counted = _counted(opened)
    made = _provenance(counted)
    sets = SetJudge([x for x in opened if isinstance(x, Opened)], counted)
    nodes = []
    for each in opened:
        if isinstance(each, Node):
            nodes.append(each)
        elif artifact.is_image and (words := sets.superseded(each)):
            nodes.append(Node(_title(each), words=words))
        else:
            nodes.append(_judge(each, artifact, made, checkout))
    believed = tuple(
        Believed(x.item.name, x.envelope.statement, x.keys)
        for x in opened
        if isinstance(x, Opened) and x.is_believed and not sets.superseded(x)
    )
    if artifact.is_image:
        nodes += sets.judge(made)
        nodes += _missing(counted, made, gates_may_wait=gates_may_wait)
    return Walk(Node(title, children=tuple(nodes)), believed, sets.believed)


def _counted(opened: Sequence[Opened | Node]) -> list[Opened]:
    """What the rest is judged by: believed statements; where nobody is believed, all of them.

    Then nothing comes out valid, but what contradicts and what is missing is told all the same.
    """
    here = [x for x in opened if isinstance(x, Opened) and x.is_about_this]
    return [x for x in here if x.is_believed] or here


def _is_secondary(item: EvidenceItem) -> bool:
    """Provenance comes first: the rest is read in its light."""
    found = item.envelope
    return found is None or found.statement.predicate_type != PROVENANCE


def _open(
    item: EvidenceItem, artifact: Artifact, trust: Trust | None, now: datetime
) -> Opened | Node:
    envelope = item.envelope
    if envelope is None:
        return Node(item.name, Verdict.BROKEN, item.error)
    signature, keys = judge_signatures(envelope, trust, now)
    checks = (signature, _subject(envelope, artifact))
    return Opened(item, envelope, checks, tuple(keys), trust)


def _subject(envelope: Envelope, artifact: Artifact) -> Node:
    if envelope.statement.is_about(artifact.digest):
        return Node("subject", words="these very bytes")
    other = envelope.statement.subject[0]
    words = f"is about {other.name} sha256:{other.digest.sha256}, not about this"
    return Node("subject", Verdict.BROKEN, words)


def _provenance(counted: Sequence[Opened]) -> Provenance | None:
    """The first provenance that can be read."""
    for each in counted:
        statement = each.envelope.statement
        if statement.predicate_type == PROVENANCE:
            try:
                return read_provenance(statement.predicate)
            except RecordInvalid:
                continue
    return None


def _title(opened: Opened) -> str:
    return f"{kind_of(opened.envelope.statement.predicate_type)} ({opened.item.name})"


def _judge(
    opened: Opened, artifact: Artifact, made: Provenance | None, checkout: Checkout | None
) -> Node:
    """An envelope's node: what stands in it is only looked at when it speaks of this artifact."""
    statement, title = opened.envelope.statement, _title(opened)
    if not opened.is_about_this:
        return Node(title, children=opened.checks)
    try:
        said = _content(opened, statement, artifact, made, checkout)
    except RecordInvalid as error:
        said = (Node("predicate", Verdict.BROKEN, str(error)),)
    return Node(title, children=(*opened.checks, *said))


def _content(
    opened: Opened,
    statement: Statement,
    artifact: Artifact,
    made: Provenance | None,
    checkout: Checkout | None,
) -> tuple[Node, ...]:
    kind, predicate = statement.predicate_type, statement.predicate
    if kind == PROVENANCE:
        return judge_materials(read_provenance(predicate), artifact, checkout, opened.trust)
    if kind == TEST_RESULT:
        external = made.definition.external if made else None
        image = external.image if external else None
        cards = external.images[external.image].cards if external else None
        return (judge_tests(read_test_result(predicate), image, checkout, cards),)
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


def _rebuild(opened: Opened, predicate: dict[str, Any], artifact: Artifact) -> Node:
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


def _missing(
    counted: Sequence[Opened], made: Provenance | None, *, gates_may_wait: bool
) -> list[Node]:
    """Evidence that an image must have and this one has not."""
    if not counted:
        return []  # broken already, and said so
    if made is None:
        return [Node("provenance", Verdict.INCOMPLETE, "nothing says what it was made of")]
    external = made.definition.external
    tests = [x.believed.test for x in counted]
    found = {test.gate for test in tests if test}
    missing = [g for g in external.images[external.image].gates if g not in found]
    if missing and gates_may_wait:
        words = f"not run yet: {', '.join(missing)}"
        return [Node("gates", words=f"{words} (`sm120 build {external.image} --gate`)")]
    return [
        Node(f"gate {gate}", Verdict.INCOMPLETE, "is asked for, but no result is recorded")
        for gate in missing
    ]
