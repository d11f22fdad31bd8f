"""A weights set on a disk: its lock, its files, and the signatures over them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.artifacts.attest.names import WEIGHTS
from pipeline.artifacts.attest.trust import judges_strangers
from pipeline.core import log
from pipeline.core.errors import LocksDisagree, LockStale, ModelSignatureInvalid, PipelineError
from pipeline.evidence.verify.artifact import Artifact
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import EvidenceItem
from pipeline.evidence.verify.verdict import Code, Node, Verdict, broken, incomplete, stale
from pipeline.evidence.verify.walk import JudgedEvidence, walk_evidence
from pipeline.evidence.verify.weights_backing import weights_signer
from pipeline.weights.check.verify import WeightsVerifyOptions, checkout_backing, verify_files
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign import signing
from pipeline.weights.sign.record import set_digest

_SIGNATURE = "model signature"


def judge_weights(
    place: LockedFolder,
    neighbours: Collection[LockedFolder],
    items: Sequence[EvidenceItem],
    context: VerifyContext,
) -> JudgedEvidence:
    """Compares files with the lock, then signature and records with both."""
    lock = place.lock
    artifact = Artifact(lock.name, set_digest(lock), size_bytes=lock.size_bytes)
    nodes = [_lock(place, context), _files(place, neighbours, deep=context.deep)]
    signature = signing.default_signature(place)
    is_vouched = False
    if signature.exists():
        nodes.append(_signature(place, signature, context))
        is_vouched = nodes[-1].verdict is Verdict.VALID
    judged = JudgedEvidence(Node(artifact.title))
    if items:
        judged = walk_evidence(
            artifact, items, context.trust, context.checkout, context.now, only=WEIGHTS
        )
    for node in judged.node.children:
        # a statement that `fetch` or `verify` made without a key takes nothing from a signed set
        if is_vouched and node.verdict is Verdict.UNSIGNED:
            node = Node(node.title, message="unsigned; the model signature vouches for the set")
        nodes.append(node)
    if not items and not signature.exists():
        message = "neither the set nor a record of it is signed"
        nodes.append(Node("signature", Verdict.UNSIGNED, message))
    return replace(judged, node=Node(f"{lock.name} {artifact.digest}", children=tuple(nodes)))


def _lock(place: LockedFolder, context: VerifyContext) -> Node:
    """The lock beside the files; a checkout may have a newer one."""
    lock, title = place.lock, "lock"
    message = f"{len(lock.files)} files of {lock.repository} at {lock.commit[:12]}"
    try:
        if checkout_backing(place, context.checkout).vouched_by:
            message += ", as in the checkout"
    # the most telling first: they are all PipelineErrors
    except LockStale as error:
        return stale(title, str(error))
    except LocksDisagree as error:
        return broken(title, str(error))
    except PipelineError as error:
        return incomplete(title, str(error))
    return Node(title, message=message)


def _files(place: LockedFolder, neighbours: Collection[LockedFolder], *, deep: bool) -> Node:
    title, unknown = "files", 0
    if deep:
        report = verify_files(place, WeightsVerifyOptions(full=True), neighbours).report
        damage = report.damage
        message = f"{report.files_read} read, {log.size(place.lock.size_bytes)}"
    else:
        # reading a large model again takes long; the receipt knows each file by size and times
        seen = check_by_receipt(place, neighbours)
        damage = [finding for finding in seen.findings if finding.damage]
        unknown = len(seen.unknown)
        message = f"{len(seen.proved)} as the receipt saw them, not read (--deep reads them)"
    if damage:
        first = damage[0]
        return broken(title, f"{first.path}: {first.kind} {first.detail}".rstrip())
    if unknown:
        return incomplete(title, f"{unknown} have no receipt; --deep reads them")
    return Node(title, message=message)


def _signature(place: LockedFolder, path: Path, context: VerifyContext) -> Node:
    try:
        key = weights_signer(path, context.trust.keys if context.trust else ())
    except ModelSignatureInvalid as error:
        if judges_strangers(context.trust):
            return broken(_SIGNATURE, str(error))
        message = "no key that is trusted here made it"
        return Node(_SIGNATURE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER)
    try:
        # files that the receipt proves unchanged are not hashed again
        known = {p.path: p.sha256 for p in check_by_receipt(place).proved if p.sha256}
        done = signing.compare_signature(
            place.snapshot, path, key.key, {} if context.deep else known
        )
    except ModelSignatureInvalid as error:
        return broken(_SIGNATURE, str(error))
    # a bundle without a transparency log has no time
    if objection := key.objection(WEIGHTS, None, context.now):
        return broken(_SIGNATURE, objection)
    message = f"by {key.name}, over {done.files} files, {done.files_read} read"
    return Node(_SIGNATURE, message=message)
