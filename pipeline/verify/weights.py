"""A weights set on a disk: its lock, its files, and the signatures over them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from pipeline import log
from pipeline.attest import bundle
from pipeline.attest.envelope import read_kept
from pipeline.attest.names import WEIGHTS
from pipeline.attest.trust import Trust, TrustedKey, judges_strangers
from pipeline.errors import (
    LockEdited,
    LocksDisagree,
    LockStale,
    ModelSignatureInvalid,
    PipelineError,
)
from pipeline.model import sha256_of
from pipeline.verify.artifact import Artifact
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import EvidenceItem
from pipeline.verify.signature import judge_signatures
from pipeline.verify.verdict import Code, Node, Verdict, broken, incomplete, stale
from pipeline.verify.walk import Walk, walk
from pipeline.weights.check.backing import Backing, checkout_backing
from pipeline.weights.check.verify import VerifyOptions, verify
from pipeline.weights.disk.receipt import check_by_receipt
from pipeline.weights.disk.survey import some
from pipeline.weights.model import dump
from pipeline.weights.place import Place
from pipeline.weights.sign import signing
from pipeline.weights.sign.manifest import locked_digests
from pipeline.weights.sign.record import record_path, set_digest

_SIGNATURE = "model signature"
_HINT = (
    "Nothing was judged. If the set was changed on purpose, sign it anew;"
    " `--lock FILE` chooses another lock to judge by."
)


def judge_weights(
    place: Place, neighbours: Collection[Place], items: Sequence[EvidenceItem], judge: Judge
) -> Walk:
    """Files against the lock, then signature and records against both."""
    lock = place.lock
    artifact = Artifact(lock.name, set_digest(lock), size_bytes=lock.size_bytes)
    nodes = [_lock(place, judge), _files(place, neighbours, deep=judge.deep)]
    signature = signing.default_signature(place)
    is_vouched = False
    if signature.exists():
        nodes.append(_signature(place, signature, judge))
        is_vouched = nodes[-1].verdict is Verdict.VALID
    walked = Walk(Node(artifact.title), ())
    if items:
        walked = walk(artifact, items, judge.trust, judge.checkout, judge.now, only=WEIGHTS)
    for node in walked.node.children:
        # a statement that `fetch` or `verify` made without a key takes nothing from a signed set
        if is_vouched and node.verdict is Verdict.UNSIGNED:
            node = Node(node.title, message="unsigned; the model signature vouches for the set")
        nodes.append(node)
    if not items and not signature.exists():
        message = "neither the set nor a record of it is signed"
        nodes.append(Node("signature", Verdict.UNSIGNED, message))
    return replace(walked, node=Node(f"{lock.name} {artifact.digest}", children=tuple(nodes)))


def _lock(place: Place, judge: Judge) -> Node:
    """The lock beside the files; a checkout may have a newer one."""
    lock, title = place.lock, "lock"
    message = f"{len(lock.files)} files of {lock.repository} at {lock.commit[:12]}"
    try:
        if checkout_backing(place, judge.checkout).vouched_by:
            message += ", as in the checkout"
    # the most telling first: they are all PipelineErrors
    except LockStale as error:
        return stale(title, str(error))
    except LocksDisagree as error:
        return broken(title, str(error))
    except PipelineError as error:
        return incomplete(title, str(error))
    return Node(title, message=message)


def _files(place: Place, neighbours: Collection[Place], *, deep: bool) -> Node:
    title, unknown = "files", 0
    if deep:
        report = verify(place, VerifyOptions(full=True), neighbours).report
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


def _signature(place: Place, path: Path, judge: Judge) -> Node:
    try:
        key = _signer_of(path, judge.trust.keys if judge.trust else ())
    except ModelSignatureInvalid as error:
        if judges_strangers(judge.trust):
            return broken(_SIGNATURE, str(error))
        message = "no key that is trusted here made it"
        return Node(_SIGNATURE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER)
    try:
        # files that the receipt proves unchanged are not hashed again
        known = {p.path: p.sha256 for p in check_by_receipt(place).proved if p.sha256}
        done = signing.check(place.snapshot, path, key.key, {} if judge.deep else known)
    except ModelSignatureInvalid as error:
        return broken(_SIGNATURE, str(error))
    # a bundle without a transparency log has no time
    if objection := key.objection(WEIGHTS, None, judge.now):
        return broken(_SIGNATURE, objection)
    message = f"by {key.name}, over {done.files} files, {done.files_read} read"
    return Node(_SIGNATURE, message=message)


def _signer_of(path: Path, keys: Sequence[TrustedKey]) -> TrustedKey:
    """The trusted key that made a model signature."""
    reasons = []
    for key in keys:
        try:
            bundle.opened(path, key.key)
            return key
        except ModelSignatureInvalid as error:
            reasons.append(error)
    # with one key the exact reason helps; with many it would be the last one's
    if len(reasons) == 1:
        raise reasons[0]
    raise ModelSignatureInvalid(f"{path.name}: no key of the trust file made it")


def signed_backing(place: Place, backing: Backing, trust: Trust, now: datetime) -> Backing:
    """Who else vouches for the lock; raises where a trusted key signed another one.

    A signature by an untrusted key decides nothing, either way. A record is made of every
    verify, so it shows whether the lock was exchanged since, and does not vouch for it.
    """
    recorded, signed = _by_record(place, trust, now), _by_signature(place, trust, now)
    names = [name for name in (backing.vouched_by, signed) if name]
    return backing.model_copy(update={"vouched_by": " and ".join(names), "recorded_by": recorded})


def _by_record(place: Place, trust: Trust, now: datetime) -> str:
    """A signed record names the lock by its digest, and the commit it is of."""
    path, lock = record_path(place), place.lock
    if (envelope := read_kept(path)) is None:
        return ""
    _, keys = judge_signatures(envelope, trust, now)
    subjects = {s.name: f"sha256:{s.digest.sha256}" for s in envelope.statement.subject}
    # a record of another commit is of an earlier set in this folder
    is_of_this = f"{lock.repository}@{lock.commit}" in subjects
    if not keys or envelope.statement.predicate_type != WEIGHTS or not is_of_this:
        return ""
    if sha256_of(dump(lock).encode()) not in subjects.values():
        message = f"is not the lock that {keys[0].name} signed in {path.name}"
        raise LockEdited(f"{place.lock_file} {message}", _HINT)
    return keys[0].name


def _by_signature(place: Place, trust: Trust, now: datetime) -> str:
    """A model signature names files by their SHA-256; small ones are read for theirs."""
    path, lock = signing.default_signature(place), place.lock
    try:
        key = _signer_of(path, trust.keys)
        signed = signing.signed_files(path, key.key)
    except (OSError, ModelSignatureInvalid):
        return ""
    if key.objection(WEIGHTS, None, now):
        return ""
    listed = [pin for pin in lock.files if pin.path in signed.files]
    # a small file that is not as locked has none: then the signature covers too little
    digests = {p: d for p, d in locked_digests(place, listed).items() if isinstance(d, str)}
    if wrong := sorted(p for p, digest in digests.items() if digest != signed.files[p]):
        message = f"contradicts what {key.name} signed in {path.name}: {some(wrong)}"
        raise ModelSignatureInvalid(f"{place.lock_file} {message}", _HINT)
    covered = {pin.path for pin in lock.files if not signed.ignores(pin.path)}
    return f"the signature of {key.name}" if covered <= digests.keys() else ""
