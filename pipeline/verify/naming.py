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
    An image of an index has the tag's name, too, but the tag must be on the index.
    """
    title = f"tag {reference.rpartition(':')[2]}"
    ours = [n for n in names if n.digest == digest]
    ours_here = newest(n for n in ours if n.reference == reference and n.index is None)
    if stripped := _put_back(reference, names, others):
        return Node(title, Verdict.MOVED, stripped)
    roots = [n for n in others if n.reference == reference and n.index is None]
    other = newest(n for n in roots if n.digest != digest)
    if ours_here is None and other is None:
        # a signed copy from another registry, or under another tag, is the usual reason
        signed_as = ", ".join(sorted({plain(n.reference) for n in ours})) or "nothing"
        message = f"no trusted signature names {digest} (signed as {signed_as})"
        return Node(title, Verdict.INCOMPLETE, message)
    if other is not None and ours_here is None:
        message = f"moved after signing: {other.key} signed {other.digest} under it"
        return Node(title, Verdict.MOVED, f"{message}, now it names {digest}")
    # at one time only an index and its images get a name, and a tag that was on one stays there
    if other is not None and ours_here is not None and not ours_here.is_later_than(other):
        message = f"moved back: {other.key} signed {other.digest} under it{other.when}"
        return Node(title, Verdict.MOVED, f"{message}, and {digest} only{ours_here.when}")
    assert ours_here is not None
    message = f"names the digest that {ours_here.key} signed under it{ours_here.when}"
    return Node(title, message=message)


def _put_back(reference: str, names: Sequence[TrustedName], seen: Sequence[TrustedName]) -> str:
    """What was seen later: one of these images under the same tag, with newer evidence."""
    for digest in dict.fromkeys(n.digest for n in names):
        here = newest(n for n in names if (n.digest, n.reference) == (digest, reference))
        again = [n for n in seen if (n.digest, n.reference) == (digest, reference)]
        last = newest(n for n in again if n.evidence_set)
        if here and last and last.is_later_than(here):
            message = f"older evidence was put back: {last.key} gave {digest} this name again"
            return f"{message}{last.when}, with the set {last.evidence_set}; the registry has less"
    return ""


class _Name(Frozen):
    """The last name that a key gave."""

    digest: Digest
    at: AwareDatetime
    evidence_set: Digest | None = None
    index: Digest | None = None


class _SeenTag(Frozen):
    """One tag, and the newest name under it by each key; also of each image in an index."""

    reference: str
    names: dict[Digest, _Name] = {}
    images: dict[Digest, dict[Digest, _Name]] = {}


class Memory:
    """What a store remembers of tags; one file for each. A read-only store learns nothing new."""

    def __init__(self, store: Store, *, is_kept: bool = True) -> None:
        self._store, self._is_kept = store, is_kept

    def recall(self, reference: str, trust: Trust | None, now: datetime) -> list[TrustedName]:
        """The names seen under a tag whose keys are still trusted."""
        seen = self._read(reference)
        return [
            TrustedName(**dict(name), reference=reference, key=key.name, key_id=key.id)
            for names in (seen.names, *seen.images.values())
            for key_id, name in names.items()
            for key in (trust.find(key_id) if trust else [])
            if not key.objection(IMAGE_SIGNATURE, name.at, now)
        ]

    def remember(self, reference: str, digest: str, names: Sequence[TrustedName]) -> None:
        """Keep each key's newest for what the tag names, and for each image in it.

        A name without a time could be replayed for ever, and is not kept.
        """
        timed = [n for n in names if n.reference == reference and n.at]
        if not timed or not self._is_kept:
            return
        # two verifiers at once must not forget each other's newer name
        with self._store.locked("verified"):
            before = self._read(reference)
            newest_names, images = dict(before.names), {k: {**v} for k, v in before.images.items()}
            for name in timed:
                is_root = name.digest == digest and name.index is None
                kept = newest_names if is_root else images.setdefault(name.digest, {})
                last = kept.get(name.key_id)
                if name.at and (last is None or last.at < name.at):
                    kept[name.key_id] = _Name(
                        digest=name.digest,
                        at=name.at,
                        evidence_set=name.evidence_set,
                        # earlier publishers did not sign which index an image was named in
                        index=None if is_root else name.index or digest,
                    )
            seen = _SeenTag(reference=reference, names=newest_names, images=images)
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
