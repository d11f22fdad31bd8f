"""Signatures of an image's digest and name, as cosign writes them; and tags that moved since.

Whoever publishes signs the name anew whenever the tag moves, with the time, just before it moves.
So a tag that was once seen on an image must not be found on one that was named earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from pipeline.attest.cosign import read_payload
from pipeline.attest.keys import is_valid_signature
from pipeline.attest.names import IMAGE_SIGNATURE
from pipeline.attest.strict import plain, read_base64
from pipeline.attest.trust import Trust, TrustedKey
from pipeline.errors import RecordInvalid
from pipeline.verify.attached import Loose
from pipeline.verify.verdict import Node, Verdict


@dataclass(frozen=True)
class Named:
    """That a trusted key gave a digest a name."""

    key: str
    digest: str
    reference: str
    key_id: str = ""
    at: datetime | None = None
    evidence_set: str | None = None

    @property
    def when(self) -> str:
        return f" at {self.at:%Y-%m-%d %H:%M:%S} UTC" if self.at else " without a time"

    def is_later_than(self, other: Named) -> bool:
        """A name without a time may be as old as any."""
        return self.at is not None and (other.at is None or self.at > other.at)


def believed_names(
    signatures: Iterable[Loose], trust: Trust | None, now: datetime
) -> tuple[list[Named], list[str]]:
    """What trusted keys signed, and what was passed over, with why."""
    found: list[Named] = []
    passed_over: list[str] = []
    for each in signatures:
        try:
            said = read_payload(each.data)
            key = _signer(each, trust)
        except RecordInvalid as error:
            passed_over.append(f"image signature {each.name}: {error}")
            continue
        objection = key.objection(IMAGE_SIGNATURE, said.at, now)
        if objection:
            passed_over.append(f"image signature {each.name}: {objection}")
            continue
        given = (key.name, said.digest, said.reference, key.id, said.at, said.evidence_set)
        found.append(Named(*given))
    return found, passed_over


def _signer(found: Loose, trust: Trust | None) -> TrustedKey:
    sig = read_base64(found.signature, "signature")
    for key in trust.keys if trust else []:
        if is_valid_signature(key.key, sig, found.data):
            return key
    raise RecordInvalid("no key of the trust file made it")


def judge_names(digest: str, names: Sequence[Named], sets: Collection[str] = ()) -> list[Node]:
    """A trusted signature that speaks of another image was put here by somebody.

    The last name that a key gave under a reference must have the set of evidence that it was given
    with; earlier ones were given with sets that may have been replaced since.
    """
    nodes = []
    for name in names:
        title = f"image signature by {name.key}"
        if name.digest != digest:
            nodes.append(Node(title, Verdict.BROKEN, f"is about {name.digest}, not about this"))
        elif name.evidence_set in (None, *sets) or _has_later(name, names):
            nodes.append(Node(title, words=f"as {plain(name.reference)}"))
        else:
            words = "was given with a set of evidence that is missing"
            nodes.append(Node(title, Verdict.BROKEN, f"{words}: {name.evidence_set}"))
    return nodes


def judge_commitment(
    names: Sequence[Named], sets: Collection[str], *, is_named: bool = False
) -> list[Node]:
    """Who signs a name signs with which evidence: without that, older evidence could stand there.

    An index is signed like the images in it, so it tells of an image whose own name was deleted.
    """
    if not sets or not (names or is_named) or any(n.evidence_set in sets for n in names):
        return []
    words = "no signed name commits to its evidence: it may be older than what was published"
    return [Node("image signature", Verdict.INCOMPLETE, words)]


def _has_later(name: Named, names: Sequence[Named]) -> bool:
    same = [n for n in names if (n.key_id, n.reference) == (name.key_id, name.reference)]
    return any(n.digest == name.digest and n.is_later_than(name) for n in same)


def newest(names: Iterable[Named]) -> Named | None:
    """The name that was given last."""
    found: Named | None = None
    for name in names:
        if found is None or name.is_later_than(found):
            found = name
    return found


def judge_tag(reference: str, digest: str, names: Sequence[Named], others: Sequence[Named]) -> Node:
    """Whether a trusted key says that this tag is this image.

    `others` are other images' names: those that the tag was seen on, or all that the registry has.
    """
    title = f"tag {reference.rpartition(':')[2]}"
    ours = [n for n in names if n.digest == digest]
    ours_here = newest(n for n in ours if n.reference == reference)
    if ours_here is not None:
        stripped = [n for n in others if n.reference == reference and n.digest == digest]
        last = newest(n for n in stripped if n.evidence_set and n.is_later_than(ours_here))
        if last is not None:
            words = f"its evidence was put back: {last.key} gave it this name again{last.when}"
            words += f", with the set {last.evidence_set}"
            return Node(title, Verdict.MOVED, f"{words}, and what is here is older")
    other = newest(n for n in others if n.reference == reference and n.digest != digest)
    if ours_here is None and other is None:
        signed_as = ", ".join(sorted({plain(n.reference) for n in ours})) or "nothing"
        words = f"no trusted signature says that it is {digest} (signed as {signed_as})"
        return Node(title, Verdict.INCOMPLETE, words)
    if other is not None and ours_here is None:
        words = f"moved after signing: {other.key} signed {other.digest} under it"
        return Node(title, Verdict.MOVED, f"{words}, now it names {digest}")
    if other is not None and ours_here is not None and other.is_later_than(ours_here):
        words = f"moved back: {other.key} signed {other.digest} under it{other.when}"
        return Node(title, Verdict.MOVED, f"{words}, and {digest} only{ours_here.when}")
    assert ours_here is not None
    words = f"names the digest that {ours_here.key} signed under it{ours_here.when}"
    return Node(title, words=words)
