"""The verdict on an image with all that is attached to it, and on what a reference names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from pipeline.attest.names import BILL_MEDIA
from pipeline.attest.strict import plain, read_json
from pipeline.attest.trust import Trust
from pipeline.errors import RecordInvalid
from pipeline.model import canonical_json
from pipeline.spec.checkout import Checkout
from pipeline.verify.artifact import Artifact
from pipeline.verify.attached import Attached, Loose
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.memory import Memory
from pipeline.verify.naming import Named, believed_names, judge_commitment, judge_names, judge_tag
from pipeline.verify.opened import Believed
from pipeline.verify.remote import Remote, attached_to, named_elsewhere, open_remote_image
from pipeline.verify.verdict import Node, Verdict
from pipeline.verify.walk import Walk, walk


@dataclass(frozen=True)
class Judge:
    """By what is judged."""

    trust: Trust | None
    checkout: Checkout | None
    now: datetime
    deep: bool = False
    jobs: int = 4
    memory: Memory | None = None


@dataclass(frozen=True)
class Chain:
    """A tree, and the walks in it: one for each image."""

    node: Node
    walks: tuple[Walk, ...]


def judge_attached(
    artifact: Artifact, found: Attached, judge: Judge, *, is_named: bool = False
) -> Walk:
    """An image with what is attached to it; `is_named` where an index over it has a signed name."""
    walked = walk(artifact, found.items, judge.trust, judge.checkout, judge.now)
    names, doubts = believed_names(found.signatures, judge.trust, judge.now)
    nodes = judge_names(artifact.digest, names, walked.sets)
    nodes += judge_commitment(names, walked.sets, is_named=is_named)
    nodes += [_bill(bill, walked.believed) for bill in found.bills]
    nodes += [_note(note) for note in found.notes]
    nodes += _passed_over([*found.passed_over, *doubts])
    node = replace(walked.node, children=(*walked.node.children, *nodes))
    return replace(walked, node=node)


def _bill(bill: Loose, believed: Sequence[Believed]) -> Node:
    """A plain bill counts only as a copy of one that was signed."""
    title = f"plain bill {bill.name}"
    for each in believed:
        statement = each.statement
        if BILL_MEDIA.get(statement.predicate_type) == bill.media_type and (
            canonical_json(statement.predicate) == bill.data.strip()
        ):
            return Node(title, words=f"the same as in {each.name}")
    return Node(title, Verdict.BROKEN, "is no bill of materials that was signed for this image")


def _note(note: Loose) -> Node:
    title = f"note {note.name}"
    try:
        said = read_json(note.data, "note")
        words = plain(f"{said['gates']}; {said['reason']}")
    except (RecordInvalid, KeyError, TypeError):
        return Node(title, Verdict.BROKEN, "cannot be read")
    return Node(title, Verdict.INCOMPLETE, f"published although its gates had not passed: {words}")


def _passed_over(words: Sequence[str]) -> list[Node]:
    return [Node("passed over", words=plain(each).replace("\n", " ")) for each in words]


def judge_remote(remote: Remote, judge: Judge, more: Sequence[EvidenceItem] = ()) -> Chain:
    """All images that a reference names and, where it is a tag, whether the tag may name them."""
    walks, own = [], []
    names: list[Named] = []
    if remote.root not in remote.images:
        found = attached_to(remote, remote.root, judge.jobs)
        of_index, doubts = believed_names(found.signatures, judge.trust, judge.now)
        own += judge_names(remote.root.digest, of_index)
        own += _passed_over([*found.passed_over, *doubts])
        names += of_index
    is_named = bool(names)
    for image in remote.images:
        artifact = open_remote_image(remote, image, deep=judge.deep, jobs=judge.jobs)
        found = attached_to(remote, image, judge.jobs)
        names += believed_names(found.signatures, judge.trust, judge.now)[0]
        found.items += more
        walks.append(judge_attached(artifact, found, judge, is_named=is_named))
    nodes = [_depth(remote, judge), *own, *(w.node for w in walks)]
    if remote.tag:
        nodes.insert(0, _tag(remote, names, judge))
    title = f"{remote.reference} {remote.root.digest}"
    return Chain(Node(title, children=tuple(nodes)), tuple(walks))


def _depth(remote: Remote, judge: Judge) -> Node:
    count = sum(len(image.layers) for image in remote.images)
    how = "every byte read" if judge.deep else "there, not read (--deep reads them)"
    return Node("in the registry", words=f"{count} layers, {how}")


def _tag(remote: Remote, names: list[Named], judge: Judge) -> Node:
    digest = remote.tag_digest or remote.root.digest
    if digest != remote.root.digest:
        words = f"names {digest} now, not {remote.root.digest}"
        return Node(f"tag {remote.tag}", Verdict.MOVED, words)
    reference, memory = remote.reference, judge.memory
    seen = memory.recall(reference, judge.trust, judge.now) if memory else []
    found = judge_tag(reference, digest, names, seen)
    if found.verdict is Verdict.INCOMPLETE:
        others = named_elsewhere(remote, judge.trust, judge.now, judge.jobs)
        return judge_tag(reference, digest, names, others)
    if memory and found.verdict is Verdict.VALID:
        memory.remember(reference, [n for n in names if n.digest == digest])
    return found
