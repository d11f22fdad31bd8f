"""A weights set on a disk: its lock, its files, and what was signed of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline import log
from pipeline.attest.names import WEIGHTS
from pipeline.attest.trust import judges_strangers
from pipeline.errors import (
    LocksDisagree,
    LockStale,
    ModelSignatureInvalid,
    PipelineError,
)
from pipeline.spec.checkout import Checkout
from pipeline.verify.artifact import Artifact
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.verdict import Code, Node, Verdict
from pipeline.verify.walk import Walk, walk
from pipeline.verify.weights_backing import signer_of
from pipeline.weights.check.backing import checkout_backing
from pipeline.weights.check.verify import VerifyOptions, verify
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.place import Place
from pipeline.weights.sign import signing
from pipeline.weights.sign.record import set_digest

SIGNATURE = "model signature"


def judge_weights(
    place: Place, neighbours: Collection[Place], items: Sequence[EvidenceItem], judge: Judge
) -> Walk:
    """Files against the lock, then signature and records against both."""
    lock = place.lock
    artifact = Artifact(lock.name, set_digest(lock), size_bytes=lock.size_bytes)
    nodes = [_lock(place, judge.checkout), _files(place, neighbours, deep=judge.deep)]
    signature = signing.default_signature(place)
    if signature.exists():
        nodes.append(_signature(place, signature, judge))
    if items:
        given = (judge.trust, judge.checkout, judge.now)
        walked = walk(artifact, items, *given, only=WEIGHTS)
        # the model signature was judged last, if there is one
        vouched = nodes[-1].title == SIGNATURE and nodes[-1].verdict is Verdict.VALID
        nodes += [_covered(x) if vouched else x for x in walked.node.children]
    else:
        walked = Walk(Node(artifact.title), ())
    if not items and not signature.exists():
        nodes.append(
            Node("signature", Verdict.UNSIGNED, "neither the set nor a record of it is signed")
        )
    return replace(walked, node=Node(f"{lock.name} {artifact.digest}", children=tuple(nodes)))


def _covered(node: Node) -> Node:
    """A statement that `fetch` or `verify` left unsigned takes nothing from a signed set."""
    if node.verdict is not Verdict.UNSIGNED:
        return node
    return Node(node.title, message="unsigned; the model signature vouches for the set")


def _lock(place: Place, checkout: Checkout | None) -> Node:
    """The lock beside the files; a checkout may have a newer one."""
    lock = place.lock
    message = f"{len(lock.files)} files of {lock.repository} at {lock.commit[:12]}"
    try:
        backing = checkout_backing(place, checkout)
    # the most telling first: they are all PipelineErrors
    except LockStale as error:
        return Node("lock", Verdict.STALE, str(error))
    except LocksDisagree as error:
        return Node("lock", Verdict.BROKEN, str(error))
    except PipelineError as error:
        return Node("lock", Verdict.INCOMPLETE, str(error))
    return Node("lock", message=f"{message}, as in the checkout" if backing.vouched_by else message)


def _files(place: Place, neighbours: Collection[Place], *, deep: bool) -> Node:
    if deep:
        report = verify(place, VerifyOptions(full=True), neighbours).report
        damage, unknown = report.damage, 0
        message = f"{report.files_read} read, {log.size(place.lock.size_bytes)}"
    else:
        # reading a large model again takes long; the receipt knows each file by size and times
        seen = check_by_receipt(place, neighbours)
        damage = [finding for finding in seen.findings if finding.damage]
        unknown = len(seen.unknown)
        message = f"{len(seen.proved)} as the receipt saw them, not read (--deep reads them)"
    if damage:
        first = damage[0]
        return Node("files", Verdict.BROKEN, f"{first.path}: {first.kind} {first.detail}".rstrip())
    if unknown:
        message = f"{unknown} have no receipt; --deep reads them"
        return Node("files", Verdict.INCOMPLETE, message)
    return Node("files", message=message)


def _signature(place: Place, path: Path, judge: Judge) -> Node:
    title = SIGNATURE
    try:
        key = signer_of(path, judge.trust.keys if judge.trust else ())
    except ModelSignatureInvalid as error:
        if judges_strangers(judge.trust):
            return Node(title, Verdict.BROKEN, str(error))
        message = "no key that is trusted here made it"
        return Node(title, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER)
    try:
        # files that the receipt proves unchanged are not hashed again
        known = {p.path: p.sha256 for p in check_by_receipt(place).proved if p.sha256}
        done = signing.check(place.snapshot, path, key.key, {} if judge.deep else known)
    except ModelSignatureInvalid as error:
        return Node(title, Verdict.BROKEN, str(error))
    # a bundle without a transparency log has no time
    if objection := key.objection(WEIGHTS, None, judge.now):
        return Node(title, Verdict.BROKEN, objection)
    return Node(title, message=f"by {key.name}, over {done.files} files, {done.files_read} read")
