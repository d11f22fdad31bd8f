"""Whose signature beside a weights set vouches for its lock; loads no code of images."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pipeline.artifacts.attest import bundle
from pipeline.artifacts.attest.envelope import read_kept_envelope
from pipeline.artifacts.attest.names import WEIGHTS
from pipeline.artifacts.attest.trust import Trust, TrustedKey
from pipeline.core.errors import LockEdited, ModelSignatureInvalid
from pipeline.core.model import sha256_of
from pipeline.evidence.verify.signature import judge_signatures
from pipeline.weights.check.verify import Backing
from pipeline.weights.disk.survey import some
from pipeline.weights.model import dump_weights_lock
from pipeline.weights.place import LockedFolder
from pipeline.weights.sign import signing
from pipeline.weights.sign.record import weights_record_path
from pipeline.weights.sign.signing import locked_digests

_HINT = (
    "Nothing was judged. If the set was changed on purpose, sign it anew;"
    " `--lock FILE` chooses another lock to judge by."
)


def weights_signer(path: Path, keys: Sequence[TrustedKey]) -> TrustedKey:
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


def signed_backing(place: LockedFolder, backing: Backing, trust: Trust, now: datetime) -> Backing:
    """Who else vouches for the lock; raises where a trusted key signed another one.

    A signature by an untrusted key decides nothing, either way. A record is made of every
    verify, so it shows whether the lock was exchanged since, and does not vouch for it.
    """
    lock, recorded, signed = place.lock, "", ""
    # a signed record names the lock by its digest, and the commit it is of
    if envelope := read_kept_envelope(weights_record_path(place)):
        statement, (_, keys) = envelope.statement, judge_signatures(envelope, trust, now)
        subjects = {s.name: f"sha256:{s.digest.sha256}" for s in statement.subject}
        # a record of another commit is of an earlier set in this folder
        is_of_this = f"{lock.repository}@{lock.commit}" in subjects
        if keys and statement.predicate_type == WEIGHTS and is_of_this:
            recorded = keys[0].name
            if sha256_of(dump_weights_lock(lock).encode()) not in subjects.values():
                message = (
                    f"is not the lock that {recorded} signed in {weights_record_path(place).name}"
                )
                raise LockEdited(f"{place.lock_file} {message}", _HINT)
    path, files = signing.default_signature(place), None
    with suppress(OSError, ModelSignatureInvalid):
        key = weights_signer(path, trust.keys)
        files = signing.signed_files(path, key.key)
    if files and not key.objection(WEIGHTS, None, now):
        # a model signature names files by their SHA-256; small ones are read for theirs
        listed = [pin for pin in lock.files if pin.path in files.files]
        # a small file that is not as locked has none: then the signature covers too little
        digests = {p: d for p, d in locked_digests(place, listed).items() if isinstance(d, str)}
        if wrong := sorted(p for p, digest in digests.items() if digest != files.files[p]):
            message = f"contradicts what {key.name} signed in {path.name}: {some(wrong)}"
            raise ModelSignatureInvalid(f"{place.lock_file} {message}", _HINT)
        covered = {pin.path for pin in lock.files if not files.ignores(pin.path)}
        signed = f"the signature of {key.name}" if covered <= digests.keys() else ""
    names = [name for name in (backing.vouched_by, signed) if name]
    return backing.model_copy(update={"vouched_by": " and ".join(names), "recorded_by": recorded})
