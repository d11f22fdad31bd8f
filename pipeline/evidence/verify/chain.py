"""The verdict on an image with all that is attached to it, and on what a reference names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from pipeline.artifacts.attest.names import (
    BILL_MEDIA,
    CYCLONEDX,
    PROVENANCE,
    SPDX,
    TEST_RESULT,
    kind_of,
)
from pipeline.artifacts.attest.predicates import check_predicate
from pipeline.artifacts.attest.strict import plain, read_json
from pipeline.artifacts.attest.trust import Trust
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import canonical_json
from pipeline.evidence.statements.provenance import read_provenance
from pipeline.evidence.verify import naming
from pipeline.evidence.verify.artifact import Artifact, open_file
from pipeline.evidence.verify.evidence import AttachedEvidence, EvidenceItem
from pipeline.evidence.verify.remote import (
    RemoteImage,
    attached_to,
    named_elsewhere,
    open_remote_image,
)
from pipeline.evidence.verify.signature import Opened, judge_signatures
from pipeline.evidence.verify.verdict import Node, Verdict, broken, incomplete, worst
from pipeline.evidence.verify.walk import Walk, judge_bill, judge_results, walk
from pipeline.images.gate.runs import EXCHANGES
from pipeline.images.spec.checkout import Checkout


@dataclass(frozen=True)
class Judge:
    """What evidence is judged by: trusted keys, a checkout, the time, and how deep to read."""

    trust: Trust | None
    checkout: Checkout | None
    now: datetime
    deep: bool = False
    jobs: int = 4
    memory: naming.Memory | None = None


@dataclass(frozen=True)
class Chain:
    """A tree, and the walks in it: one for each image."""

    node: Node
    walks: tuple[Walk, ...]


def judge_attached(
    artifact: Artifact, attached: AttachedEvidence, judge: Judge, *, is_named: bool = False
) -> Walk:
    """An image with its attached evidence; `is_named` where an index over it has a signed name."""
    # names are judged after statements: they must cover one of the believed sets
    walked = walk(artifact, attached.items, judge.trust, judge.checkout, judge.now)
    names, doubts = naming.believed_names(attached.signatures, judge.trust, judge.now)
    nodes = naming.judge_names(artifact.digest, names, walked.sets)
    nodes += naming.judge_commitment(names, walked.sets, is_named=is_named)
    # the first of each content: a registry keeps copies of replaced bills, too
    signed: dict[tuple[str, bytes], tuple[Opened, str]] = {}
    for each, passed_over in walked.opened:
        if media := BILL_MEDIA.get(each.statement.predicate_type):
            key = media, canonical_json(each.statement.predicate)
            signed.setdefault(key, (each, passed_over))
    for bill in attached.bills:
        title = f"unsigned SBOM {bill.name}"
        # published with a newline at the end, see publish/evidence.py
        copied, passed_over = signed.get((bill.media_type, bill.data.strip()), (None, ""))
        if copied is None:
            message = "is not a bill of materials that was signed for this image"
            nodes.append(broken(title, message))
        elif passed_over:
            message = f"a copy of {copied.name}, which does not count now"
            nodes.append(Node(title, message=message))
        else:
            # as far as the statement itself is believed
            verdict = worst(check.verdict for check in copied.checks)
            nodes.append(Node(title, verdict, f"the same as in {copied.name}"))
    for note in attached.notes:
        title = f"note {note.name}"
        try:
            body = read_json(note.data, "note")
            message = plain(f"{body['gates']}; {body['reason']}")
        except (RecordInvalid, KeyError, TypeError):
            nodes.append(broken(title, "cannot be read"))
        else:
            why = f"published although its gates did not pass: {message}"
            nodes.append(incomplete(title, why))
    nodes += _skipped([*attached.skipped, *doubts])
    node = replace(walked.node, children=(*walked.node.children, *nodes))
    return replace(walked, node=node)


def _skipped(messages: Sequence[str]) -> list[Node]:
    return [Node("skipped", message=plain(each).replace("\n", " ")) for each in messages]


def judge_remote(remote: RemoteImage, judge: Judge, more: Sequence[EvidenceItem] = ()) -> Chain:
    """All images that a reference names and, where it is a tag, whether the tag may name them."""
    walks, own = [], []
    names: list[naming.TrustedName] = []
    # an index has a signed name of its own, and no statements
    if remote.root not in remote.images:
        attached = attached_to(remote, remote.root, judge.jobs)
        of_index, doubts = naming.believed_names(attached.signatures, judge.trust, judge.now)
        own += naming.judge_names(remote.root.digest, of_index)
        own += _skipped([*attached.skipped, *doubts])
        names += of_index
    is_named = bool(names)
    for image in remote.images:
        artifact = open_remote_image(remote, image, deep=judge.deep, jobs=judge.jobs)
        attached = attached_to(remote, image, judge.jobs)
        names += naming.believed_names(attached.signatures, judge.trust, judge.now)[0]
        # files that the user names count for each image; the subject tells which it is about
        attached.items += more
        walks.append(judge_attached(artifact, attached, judge, is_named=is_named))
    count = sum(len(image.layers) for image in remote.images)
    how = "every byte read" if judge.deep else "there, not read (--deep reads them)"
    depth = Node("in the registry", message=f"{count} layers, {how}")
    # the first thing that a person asks: is this tag what was published?
    tag = [_tag(remote, names, judge)] if remote.tag else []
    children = (*tag, depth, *own, *(w.node for w in walks))
    return Chain(Node(f"{remote.reference} {remote.root.digest}", children=children), tuple(walks))


def _tag(remote: RemoteImage, names: list[naming.TrustedName], judge: Judge) -> Node:
    digest = remote.tag_digest or remote.root.digest
    # `:TAG@DIGEST` was asked for, and the tag has moved on
    if digest != remote.root.digest:
        message = f"names {digest} now, not {remote.root.digest}"
        return Node(f"tag {remote.tag}", Verdict.MOVED, message)
    reference, memory = remote.reference, judge.memory
    seen = memory.recall(reference, judge.trust, judge.now) if memory else []
    node = naming.judge_tag(reference, digest, names, seen)
    # costs a request for each signed image of the repository: only where nothing else decides
    if node.verdict is Verdict.INCOMPLETE:
        others = named_elsewhere(remote, judge.trust, judge.now, judge.jobs)
        return naming.judge_tag(reference, digest, names, others)
    # only verified names are remembered: a forged one must not block the true one
    if memory and node.verdict is Verdict.VALID:
        # of an index also the names of each image in it
        own = {digest, *(image.digest for image in remote.images)}
        memory.remember(reference, digest, [n for n in names if n.digest in own])
    return node


def judge_statement(item: EvidenceItem, judge: Judge) -> Walk:
    """A statement alone is never valid: its subject must be there to compare."""
    if item.envelope is None:
        return Walk(broken(item.name, item.error))
    statement = item.envelope.statement
    kind, predicate = statement.predicate_type, statement.predicate
    signature, keys = judge_signatures(item.envelope, judge.trust, judge.now)
    content = Node("predicate", message="well formed")
    try:
        if kind == PROVENANCE:
            read_provenance(predicate)
        elif kind == TEST_RESULT:
            # without image and checkout only the verdict itself can be judged
            content = judge_results(predicate, None, None)
        elif kind in (CYCLONEDX, SPDX):
            content = judge_bill(kind, predicate, None)
        else:
            check_predicate(kind, predicate)
    except RecordInvalid as error:
        content = broken("predicate", str(error))
    about = statement.subject[0]
    artifact = f"{about.name} sha256:{about.digest.sha256}"
    message = f"{artifact} is not here; verify that file with this statement"
    nodes = (signature, content, incomplete("subject", message))
    node = Node(f"{kind_of(kind)} ({item.name})", children=nodes)
    # a policy may still ask who signed it
    opened = Opened(item.name, item.envelope, (signature,), tuple(keys))
    return Walk(node, (opened,) if keys else ())


def judge_climb(path: Path, items: Sequence[EvidenceItem], judge: Judge) -> Walk:
    """A `smoke.json` with its statements, and the file of exchanges that they name."""
    walked = walk(open_file(path), items, judge.trust, judge.checkout, judge.now)
    if not items:
        return walked
    beside = path.with_name(EXCHANGES)
    if not beside.exists():
        exchanges = Node(EXCHANGES, Verdict.INCOMPLETE, "is not beside the result")
    else:
        digest = open_file(beside).digest
        stated = [x.statement for x, _ in walked.opened if x.is_about_this]
        exchanges = (
            Node(EXCHANGES, message="these bytes")
            if any(statement.is_about(digest) for statement in stated)
            else Node(EXCHANGES, Verdict.BROKEN, f"has {digest}, which was not stated")
        )
    node = replace(walked.node, children=(*walked.node.children, exchanges))
    return replace(walked, node=node)
