"""Signatures of an image's digest and name, as cosign writes them; and tags that moved since.

Whoever publishes signs the name anew whenever the tag moves, with the time, just before it moves.
So a tag that was seen on one image must not later be on one that was named earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pydantic import AwareDatetime, ValidationError

from pipeline.artifacts.attest.cosign import SignedName, read_payload
from pipeline.artifacts.attest.keys import is_valid_signature
from pipeline.artifacts.attest.names import IMAGE_SIGNATURE
from pipeline.artifacts.attest.strict import plain, read_base64
from pipeline.artifacts.attest.trust import Trust
from pipeline.artifacts.store.store import Store, read_own
from pipeline.core.errors import RecordInvalid, StoreDamaged
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.evidence.verify.evidence import AttachedBlob
from pipeline.evidence.verify.verdict import Node, Verdict, broken, incomplete


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
            # anybody may sign an image: a key that is not trusted is skipped, not broken
            signed = read_payload(each.data)
            signature = read_base64(each.signature, "signature")
            # cosign's signatures name no key: each trusted one is tried
            known = trust.keys if trust else ()
            made = (key for key in known if is_valid_signature(key.key, signature, each.data))
            if (key := next(made, None)) is None:
                raise RecordInvalid("no key of the trust file made it")
            if objection := key.objection(IMAGE_SIGNATURE, signed.at, now):
                raise RecordInvalid(objection)
            names.append(TrustedName(**dict(signed), key=key.name, key_id=key.id))
        except RecordInvalid as error:
            skipped.append(f"image signature {each.name}: {error}")
    return names, skipped


def judge_names(
    digest: str, names: Sequence[TrustedName], sets: Collection[str] = ()
) -> list[Node]:
    """Judges the names that trusted keys signed; one about another image is broken.

    The last name that a key gave under a reference must have the set of evidence it came with;
    the sets of earlier names may have been replaced since.
    """
    nodes = []
    for name in names:
        title = f"image signature by {name.key}"
        # each key names for itself: a later name by another key replaces nothing
        given = (name.key_id, name.reference, name.digest)
        same = (n for n in names if (n.key_id, n.reference, n.digest) == given)
        # cosign, too, compares the digest in the payload with the image
        if name.digest != digest:
            nodes.append(broken(title, f"is about {name.digest}, not about this"))
        elif name.evidence_set in (None, *sets) or any(n.is_later_than(name) for n in same):
            nodes.append(Node(title, message=f"as {plain(name.reference)}"))
        else:
            message = f"was signed with an evidence set that is missing: {name.evidence_set}"
            nodes.append(broken(title, message))
    return nodes


def _newest(names: Iterable[TrustedName]) -> TrustedName | None:
    """The name that was given last; one without a time may be as old as any."""
    return max(names, key=lambda n: n.at.timestamp() if n.at else float("-inf"), default=None)


def judge_tag(
    reference: str, digest: str, names: Sequence[TrustedName], others: Sequence[TrustedName]
) -> Node:
    """Whether a trusted key signed that this tag is this image.

    `others` are other images' names: those that the tag was seen on, or all that the registry has.
    An image of an index has the tag's name, too, but the tag must be on the index.
    """
    title = f"tag {reference.rpartition(':')[2]}"
    own_names = [n for n in names if n.reference == reference]
    other_names = [n for n in others if n.reference == reference]
    # the tag was seen on one of these images before, with newer evidence
    for each in dict.fromkeys(n.digest for n in own_names):
        latest = _newest(n for n in own_names if n.digest == each)
        last = _newest(n for n in other_names if n.digest == each and n.evidence_set)
        if latest and last and last.is_later_than(latest):
            message = f"older evidence was put back: {last.key} gave {each} this name again"
            less = f"{last.when}, with the set {last.evidence_set}; the registry has less"
            return Node(title, Verdict.MOVED, message + less)
    ours = _newest(n for n in own_names if n.digest == digest and n.index is None)
    other = _newest(n for n in other_names if n.digest != digest and n.index is None)
    if ours is None and other is not None:
        message = f"moved after signing: {other.key} signed {other.digest} under it"
        return Node(title, Verdict.MOVED, f"{message}, now it names {digest}")
    if ours is None:
        # a signed copy from another registry, or under another tag, is the usual reason
        signed_as = sorted({plain(n.reference) for n in names if n.digest == digest})
        message = f"(signed as {', '.join(signed_as) or 'nothing'})"
        return incomplete(title, f"no trusted signature names {digest} {message}")
    # at one time only an index and its images get a name, and a tag that was on one stays there
    if other is not None and not ours.is_later_than(other):
        message = f"moved back: {other.key} signed {other.digest} under it{other.when}"
        return Node(title, Verdict.MOVED, f"{message}, and {digest} only{ours.when}")
    return Node(title, message=f"names the digest that {ours.key} signed under it{ours.when}")


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


class TagMemory:
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
        timed = [(n, n.at) for n in names if n.reference == reference and n.at]
        if not timed or not self._is_kept:
            return
        # two verifiers at once must not forget each other's newer name
        with self._store.locked("verified"):
            before = self._read(reference)
            own, images = dict(before.names), {k: {**v} for k, v in before.images.items()}
            for name, at in timed:
                is_root = name.digest == digest and name.index is None
                newest = own if is_root else images.setdefault(name.digest, {})
                # earlier publishers did not sign which index an image was named in
                index = None if is_root else name.index or digest
                given = {"digest": name.digest, "at": at, "evidence_set": name.evidence_set}
                if name.key_id not in newest or newest[name.key_id].at < at:
                    newest[name.key_id] = _Name.model_validate({**given, "index": index})
            seen = _SeenTag(reference=reference, names=own, images=images)
            self._store.write(self._path(reference), canonical_json(seen.model_dump(mode="json")))

    def _read(self, reference: str) -> _SeenTag:
        seen = _SeenTag(reference=reference)
        with suppress(OSError, StoreDamaged, ValidationError):
            seen = _SeenTag.model_validate_json(read_own(self._path(reference)))
        # the file's name is a hash of the reference; its content says which
        return seen if seen.reference == reference else _SeenTag(reference=reference)

    def _path(self, reference: str) -> Path:
        name = sha256_of(reference.encode()).removeprefix("sha256:")
        return self._store.root / "verified" / f"{name}.json"
