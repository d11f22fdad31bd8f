"""Signatures of an image's digest and name, as cosign writes them; and tags that moved since.

Whoever publishes signs the name anew whenever the tag moves, with the time, just before it moves.
So a tag that was seen on one image must not later be on one that was named earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, ValidationError

from pipeline.attest.cosign import SignedName, read_payload
from pipeline.attest.keys import is_valid_signature
from pipeline.attest.names import IMAGE_SIGNATURE
from pipeline.attest.strict import plain, read_base64
from pipeline.attest.trust import Trust, TrustedKey
from pipeline.errors import RecordInvalid, StoreDamaged
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.store.store import Store, read_own
from pipeline.verify.evidence import AttachedBlob
from pipeline.verify.verdict import Node, Verdict


class TrustedName(SignedName):
    """A name that a trusted key gave to a digest."""

    key: str  # as the trust file names it
    key_id: Digest

    @property
    def when(self) -> str:
        return f" at {self.at:%Y-%m-%d %H:%M:%S} UTC" if self.at else " without a time"

    def is_later_than(self, other: TrustedName) -> bool:
        """A name without a time may be as old as any."""
        return self.at is not None and (other.at is None or self.at > other.at)


def believed_names(
    signatures: Iterable[AttachedBlob], trust: Trust | None, now: datetime
) -> tuple[list[TrustedName], list[str]]:
    """The names that trusted keys signed, and the skipped signatures with their reasons."""
    names: list[TrustedName] = []
    skipped: list[str] = []
    for each in signatures:
        try:
            # anybody may sign an image: a key that nobody here trusts is skipped, not broken
            signed = read_payload(each.data)
            key = _signer(each, trust)
        except RecordInvalid as error:
            skipped.append(f"image signature {each.name}: {error}")
            continue
        if objection := key.objection(IMAGE_SIGNATURE, signed.at, now):
            skipped.append(f"image signature {each.name}: {objection}")
        else:
            names.append(TrustedName(**dict(signed), key=key.name, key_id=key.id))
    return names, skipped


def _signer(signature: AttachedBlob, trust: Trust | None) -> TrustedKey:
    signed_bytes = read_base64(signature.signature, "signature")
    # cosign's signatures name no key: each trusted one is tried
    for key in trust.keys if trust else []:
        if is_valid_signature(key.key, signed_bytes, signature.data):
            return key
    raise RecordInvalid("no key of the trust file made it")


def judge_names(
    digest: str, names: Sequence[TrustedName], sets: Collection[str] = ()
) -> list[Node]:
    """A trusted signature that is about another image was put here by somebody.

    The last name that a key gave under a reference must have the set of evidence that it was given
    with; earlier ones were given with sets that may have been replaced since.
    """
    nodes = []
    for name in names:
        title = f"image signature by {name.key}"
        # cosign, too, compares the digest in the payload with the image
        if name.digest != digest:
            nodes.append(Node(title, Verdict.BROKEN, f"is about {name.digest}, not about this"))
        elif name.evidence_set in (None, *sets) or _has_later(name, names):
            nodes.append(Node(title, message=f"as {plain(name.reference)}"))
        else:
            message = "was signed with an evidence set that is missing"
            nodes.append(Node(title, Verdict.BROKEN, f"{message}: {name.evidence_set}"))
    return nodes


def judge_commitment(
    names: Sequence[TrustedName], sets: Collection[str], *, is_named: bool = False
) -> list[Node]:
    """A signed name must cover an evidence set: without that, older evidence could be put back.

    An index is signed like the images in it, so it tells of an image whose own name was deleted.
    """
    # without a set, or without any name, other checks say what is missing
    if not sets or not (names or is_named) or any(n.evidence_set in sets for n in names):
        return []
    message = (
        "no signed name covers its evidence set: the evidence may be older than what was published"
    )
    return [Node("image signature", Verdict.INCOMPLETE, message)]


def _has_later(name: TrustedName, names: Sequence[TrustedName]) -> bool:
    # each key names for itself: a later name by another key replaces nothing
    same = [n for n in names if (n.key_id, n.reference) == (name.key_id, name.reference)]
    return any(n.digest == name.digest and n.is_later_than(name) for n in same)


def newest(names: Iterable[TrustedName]) -> TrustedName | None:
    """The name that was given last."""
    latest: TrustedName | None = None
    for name in names:
        if latest is None or name.is_later_than(latest):
            latest = name
    return latest


def judge_tag(
    reference: str, digest: str, names: Sequence[TrustedName], others: Sequence[TrustedName]
) -> Node:
    """Whether a trusted key signed that this tag is this image.

    `others` are other images' names: those that the tag was seen on, or all that the registry has.
    """
    title = f"tag {reference.rpartition(':')[2]}"
    ours = [n for n in names if n.digest == digest]
    ours_here = newest(n for n in ours if n.reference == reference)
    if ours_here is not None:
        # the same image under the same tag, but named again with newer evidence
        stripped = [n for n in others if n.reference == reference and n.digest == digest]
        last = newest(n for n in stripped if n.evidence_set and n.is_later_than(ours_here))
        if last is not None:
            message = f"older evidence was put back: {last.key} gave it this name again{last.when}"
            message += f", with the set {last.evidence_set}"
            return Node(title, Verdict.MOVED, f"{message}, and what is here is older")
    other = newest(n for n in others if n.reference == reference and n.digest != digest)
    if ours_here is None and other is None:
        # a signed copy from another registry, or under another tag, is the usual reason
        signed_as = ", ".join(sorted({plain(n.reference) for n in ours})) or "nothing"
        message = f"no trusted signature names {digest} (signed as {signed_as})"
        return Node(title, Verdict.INCOMPLETE, message)
    if other is not None and ours_here is None:
        message = f"moved after signing: {other.key} signed {other.digest} under it"
        return Node(title, Verdict.MOVED, f"{message}, now it names {digest}")
    if other is not None and ours_here is not None and other.is_later_than(ours_here):
        message = f"moved back: {other.key} signed {other.digest} under it{other.when}"
        return Node(title, Verdict.MOVED, f"{message}, and {digest} only{ours_here.when}")
    assert ours_here is not None
    message = f"names the digest that {ours_here.key} signed under it{ours_here.when}"
    return Node(title, message=message)


class _Name(Frozen):
    """The last name that a key gave."""

    digest: Digest
    at: AwareDatetime
    evidence_set: Digest | None = None


class _SeenTag(Frozen):
    """One tag, and the newest name under it by each key."""

    reference: str
    names: dict[Digest, _Name] = {}


class Memory:
    """What a store remembers of tags; one file for each. A read-only store learns nothing new."""

    def __init__(self, store: Store, *, is_kept: bool = True) -> None:
        self._store, self._is_kept = store, is_kept

    def recall(self, reference: str, trust: Trust | None, now: datetime) -> list[TrustedName]:
        """The names seen under a tag whose keys are still trusted."""
        return [
            TrustedName(**dict(name), reference=reference, key=key.name, key_id=key.id)
            for key_id, name in self._read(reference).names.items()
            for key in (trust.find(key_id) if trust else [])
            if not key.objection(IMAGE_SIGNATURE, name.at, now)
        ]

    def remember(self, reference: str, names: Sequence[TrustedName]) -> None:
        """Keep each key's newest; a name without a time may be as old as any and is not kept."""
        # a name without a time could be replayed for ever
        timed = [n for n in names if n.reference == reference and n.at]
        if not timed or not self._is_kept:
            return
        # two verifiers at once must not forget each other's newer name
        with self._store.locked("verified"):
            newest_names = dict(self._read(reference).names)
            for name in timed:
                before = newest_names.get(name.key_id)
                if name.at and (before is None or before.at < name.at):
                    newest_names[name.key_id] = _Name(
                        digest=name.digest, at=name.at, evidence_set=name.evidence_set
                    )
            seen = _SeenTag(reference=reference, names=newest_names)
            data = canonical_json(seen.model_dump(mode="json"))
            self._store.write(self._path(reference), data)

    def _read(self, reference: str) -> _SeenTag:
        try:
            seen = _SeenTag.model_validate_json(read_own(self._path(reference)))
        except (OSError, StoreDamaged, ValidationError):
            return _SeenTag(reference=reference)
        # the file's name is a hash of the reference; its content says which
        return seen if seen.reference == reference else _SeenTag(reference=reference)

    def _path(self, reference: str) -> Path:
        name = sha256_of(reference.encode()).removeprefix("sha256:")
        return self._store.root / "verified" / f"{name}.json"
