"""The walk from an artifact back to every byte: signature, subject, materials. Needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline import log
from pipeline.assemble.plan import plan_tree
from pipeline.attest.envelope import Envelope
from pipeline.attest.names import (
    COMPILED_FILE,
    CYCLONEDX,
    PROVENANCE,
    REBUILD,
    SPDX,
    TEST_RESULT,
    UNGATED,
    WEIGHTS,
    kind_of,
)
from pipeline.attest.predicates import (
    CompiledFile,
    DeclaredDifference,
    Rebuild,
    Weights,
    check_predicate,
)
from pipeline.attest.statement import RECORDED, Statement
from pipeline.attest.strict import plain
from pipeline.attest.trust import Trust
from pipeline.errors import PipelineError, RecordInvalid
from pipeline.evidence.provenance import Provenance, read_provenance
from pipeline.known import Unknown
from pipeline.oci.document import TITLE
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import CompiledSpec
from pipeline.verify.artifact import Artifact
from pipeline.verify.evidence import EvidenceItem, distinct
from pipeline.verify.materials import judge_materials
from pipeline.verify.results import judge_bill, judge_results
from pipeline.verify.sets import SetJudge
from pipeline.verify.signature import Opened, TrustedStatement, judge_signatures
from pipeline.verify.trees import may_differ
from pipeline.verify.verdict import Code, Node, Verdict


@dataclass(frozen=True)
class Walk:
    """The tree of verdicts on one artifact, and the statements in it that count."""

    node: Node
    believed: tuple[TrustedStatement, ...]
    sets: frozenset[str] = frozenset()  # digests of the believed sets, also of older ones
    # all that could be read, each with the reason why it is passed over, if it is
    opened: tuple[tuple[Opened, str], ...] = ()


def walk(
    artifact: Artifact,
    items: Sequence[EvidenceItem],
    trust: Trust | None,
    checkout: Checkout | None,
    now: datetime,
    *,
    gates_may_wait: bool = False,
    only: str | None = None,
) -> Walk:
    """All evidence of an artifact, judged.

    `only`: the one predicate type that says anything about such an artifact. A key may be trusted
    for other kinds alone, and must not vouch by a statement of those.
    `gates_may_wait`: an image that was built here and is not published yet. That its gates have
    not run is shown; a gate result that was removed is still missed by the set.
    """
    title = f"{artifact.title} {artifact.digest}"
    if not items:
        message = "there is no evidence for it"
        return Walk(Node(title, Verdict.INCOMPLETE, message, code=Code.NO_EVIDENCE), ())
    # a registry may hold one statement several times, with more and fewer signatures
    ordered = sorted(distinct(items), key=_is_secondary)
    opened = [_open(x, artifact, trust, now, only) for x in ordered]
    counted = _counted(opened)
    made = _provenance(counted)
    if made and checkout and made.definition.external.image not in checkout.images():
        # a checkout of other images has nothing to compare this one with
        checkout = None
    sets = SetJudge([x for x in opened if isinstance(x, Opened)], counted)
    nodes: list[Node] = []
    judged: list[tuple[Opened, str]] = []
    for each in opened:
        if isinstance(each, Node):
            nodes.append(each)
            continue
        reason = sets.passed_over(each) if artifact.is_image else ""
        judged.append((each, reason))
        if reason:
            nodes.append(_node(each, message=reason))
        else:
            nodes.append(_judge(each, artifact, made, checkout))
    believed = tuple(x.believed for x, reason in judged if x.is_believed and not reason)
    if artifact.is_image:
        nodes += sets.judge(made)
        nodes += _missing(counted, made, gates_may_wait=gates_may_wait)
    return Walk(Node(title, children=tuple(nodes)), believed, sets.believed, tuple(judged))


def _counted(opened: Sequence[Opened | Node]) -> list[Opened]:
    """What the rest is judged by: trusted statements; where none is trusted, all of them.

    Then nothing is valid, but contradictions and missing evidence are still reported.
    """
    here = [x for x in opened if isinstance(x, Opened) and x.is_about_this]
    # a forged statement beside trusted ones must not decide anything
    return [x for x in here if x.is_believed] or here


def _is_secondary(item: EvidenceItem) -> bool:
    """Provenance comes first: the rest is read in its light."""
    envelope = item.envelope
    return envelope is None or envelope.statement.predicate_type != PROVENANCE


def _open(
    item: EvidenceItem,
    artifact: Artifact,
    trust: Trust | None,
    now: datetime,
    only: str | None,
) -> Opened | Node:
    envelope = item.envelope
    if envelope is None:
        return Node(item.name, Verdict.BROKEN, item.error)
    kind = envelope.statement.predicate_type
    if only not in (None, kind):
        message = f"is a statement of the kind {kind_of(kind)}, not {kind_of(only or '')}"
        # who signed it claims to vouch by it; what nobody signed says nothing either way
        verdict = Verdict.BROKEN if envelope.signatures else Verdict.UNSIGNED
        return Node(item.name, verdict, message)
    signature, keys = judge_signatures(envelope, trust, now)
    checks = (signature, _subject(envelope, artifact))
    return Opened(item, envelope, checks, tuple(keys), trust)


def _subject(envelope: Envelope, artifact: Artifact) -> Node:
    if envelope.statement.is_about(artifact.digest):
        return Node("subject", message="these bytes")
    # the first of several is enough to see what it is about
    other = envelope.statement.subject[0]
    message = f"is about {other.name} sha256:{other.digest.sha256}, not about this"
    return Node("subject", Verdict.BROKEN, message)


def _provenance(counted: Sequence[Opened]) -> Provenance | None:
    """The first provenance that can be read."""
    for each in counted:
        statement = each.envelope.statement
        if statement.predicate_type == PROVENANCE:
            try:
                return read_provenance(statement.predicate)
            # reported where that statement is judged
            except RecordInvalid:
                continue
    return None


def _node(opened: Opened, message: str = "", children: tuple[Node, ...] = ()) -> Node:
    kind = kind_of(opened.envelope.statement.predicate_type)
    return Node(f"{kind} ({opened.item.name})", message=message, children=children, subject=kind)


def _judge(
    opened: Opened, artifact: Artifact, made: Provenance | None, checkout: Checkout | None
) -> Node:
    """The node of an envelope; its content is judged only where it is about this artifact."""
    statement = opened.envelope.statement
    if not opened.is_about_this:
        return _node(opened, children=opened.checks)
    try:
        checks = _content(opened, statement, artifact, made, checkout)
    except RecordInvalid as error:
        checks = (Node("predicate", Verdict.BROKEN, str(error)),)
    return _node(opened, children=(*opened.checks, *checks))


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
        # without provenance nothing says for which cards the image is
        external = made.definition.external if made else None
        image = external.image if external else None
        cards = external.images[external.image].cards if external else None
        platform = external.platform if external else ""
        return (judge_results(predicate, image, checkout, cards, platform),)
    if kind in (CYCLONEDX, SPDX):
        return (judge_bill(kind, predicate, made),)
    check_predicate(kind, predicate)
    if kind == WEIGHTS:
        return (_weights(predicate),)
    if kind == COMPILED_FILE:
        return (_compiled(predicate, checkout),)
    if kind == UNGATED:
        message = f"published although its gates did not pass: {predicate['reason']}"
        return (Node("ungated", Verdict.INCOMPLETE, message),)
    return (_rebuild(opened, predicate, artifact, made),) if kind == REBUILD else ()


def _weights(predicate: dict[str, Any]) -> Node:
    verification = Weights.model_validate(predicate).verification
    title = f"weights, {verification.how}"
    if verification.result == "verified":
        return Node(title, message=f"verified at {verification.at}")
    # `unknown`: nobody could read the files, which proves nothing
    verdict = Verdict.BROKEN if verification.result == "damaged" else Verdict.INCOMPLETE
    return Node(
        title, verdict, f"{verification.result}: {'; '.join(verification.why) or 'no reason given'}"
    )


def _compiled(predicate: dict[str, Any], checkout: Checkout | None) -> Node:
    """Whether the checkout still compiles the file from the same inputs."""
    made = CompiledFile.model_validate({k: v for k, v in predicate.items() if k != RECORDED})
    title = f"compiled {made.source} ({made.build}) for {made.platform}"
    if checkout is None or made.source not in checkout.sources():
        return Node(title, message=f"inputs {made.inputs}")
    try:
        wanted = CompiledSpec(source=made.source, build=made.build)
        now = plan_tree(checkout, wanted, made.platform).key
    except PipelineError as error:
        return Node(title, Verdict.INCOMPLETE, f"cannot be compared with the checkout: {error}")
    if now != made.inputs:
        message = "the checkout compiles it from other inputs now: export it again"
        return Node(title, Verdict.STALE, message)
    return Node(title, message="from the inputs that the checkout has")


def _rebuild(
    opened: Opened, predicate: dict[str, Any], artifact: Artifact, made: Provenance | None
) -> Node:
    # the time is ours, beside the fields of the model
    body = {k: v for k, v in predicate.items() if k != RECORDED}
    rebuild = Rebuild.model_validate(body)
    if not rebuild.identical and not rebuild.equivalent:
        return Node("rebuild", Verdict.BROKEN, "gave a different digest")
    if rebuild.identical and (rebuild.equivalent or not isinstance(rebuild.difference, Unknown)):
        return Node("rebuild", Verdict.BROKEN, "claims to be identical, but names a difference")
    if rebuild.equivalent and (problem := _undeclared(rebuild.equivalent, made)):
        return problem
    annotations = artifact.annotations
    # the manifest's labels are part of its digest, so a rebuild of other inputs cannot pass
    labels = annotations.get(TITLE), annotations.get("sm120.inputs")
    if labels != (rebuild.image, rebuild.inputs):
        return Node("rebuild", Verdict.BROKEN, "was of other inputs than the manifest names")
    # otherwise one key could claim a rebuild in the name of another
    if opened.keys and rebuild.rebuilt_by not in {key.id for key in opened.keys}:
        message = f"names {rebuild.rebuilt_by} as its maker, which did not sign it"
        return Node("rebuild", Verdict.BROKEN, message)
    by = f"by {rebuild.rebuilt_by[:19]}…"
    if rebuild.equivalent:
        files = log.count(len(rebuild.equivalent), "file")
        return Node("rebuild", message=f"equivalent, {files} with declared differences, {by}")
    return Node("rebuild", message=f"the same digest again, {by}")


def _undeclared(differences: Sequence[DeclaredDifference], made: Provenance | None) -> Node | None:
    """A difference that no build of the image declares, for just that reason."""
    if made is None:
        message = "there is no provenance that says which files may differ"
        return Node("rebuild", Verdict.INCOMPLETE, message)
    declared = may_differ(made)
    for each in differences:
        if declared.get(each.path) != each.reason:
            message = f"{plain(each.path)} differs, and no build declares that with this reason"
            return Node("rebuild", Verdict.BROKEN, message)
    return None


def _missing(
    counted: Sequence[Opened], made: Provenance | None, *, gates_may_wait: bool
) -> list[Node]:
    """Evidence that an image must have and this one lacks."""
    if not counted:
        return []  # reported as broken already
    if made is None:
        return [Node("provenance", Verdict.INCOMPLETE, "no statement names what it was made of")]
    external = made.definition.external
    # whether it passed is judged with the statement; here only whether there is one
    tests = [x.believed.test for x in counted]
    judged = {(test.gate, test.card) for test in tests if test}
    wanted = external.images[external.image].required_results
    missing = [f"{gate} on {card}" for gate, card in wanted if (gate, card) not in judged]
    if missing and gates_may_wait:
        message = f"not run yet: {', '.join(missing)}"
        return [Node("gates", message=f"{message} (`sm120 build {external.image} --gate`)")]
    return [
        Node(f"gate {each}", Verdict.INCOMPLETE, "is required by the spec, but has no result")
        for each in missing
    ]
