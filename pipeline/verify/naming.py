"""Signatures of an image's digest and name, as cosign writes them; and tags that moved since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from pipeline.errors import RecordInvalid
from pipeline.keys import holds
from pipeline.model import Digest, Frozen
from pipeline.record.names import IMAGE_SIGNATURE
from pipeline.record.strict import as_model, read_base64, read_json
from pipeline.record.trust import Trust, TrustedKey
from pipeline.verify.attached import Loose
from pipeline.verify.verdict import Node, Verdict


class _Image(Frozen):
    digest: Digest = Field(alias="docker-manifest-digest")


class _Identity(Frozen):
    reference: str = Field(alias="docker-reference")


class _Critical(Frozen):
    identity: _Identity
    image: _Image
    type: Literal["cosign container image signature"]


class _Payload(Frozen):
    critical: _Critical
    optional: dict[str, Any] | None = None


@dataclass(frozen=True)
class Named:
    """That a trusted key gave a digest a name."""

    key: str
    digest: str
    reference: str


def believed_names(
    signatures: Iterable[Loose], trust: Trust | None, now: datetime
) -> tuple[list[Named], list[str]]:
    """What trusted keys signed, and what was passed over, with why."""
    found: list[Named] = []
    passed_over: list[str] = []
    for each in signatures:
        try:
            said = _read(each)
            key = _signer(each, trust)
        except RecordInvalid as error:
            passed_over.append(f"image signature {each.name}: {error}")
            continue
        objection = key.objection(IMAGE_SIGNATURE, None, now)
        if objection:
            passed_over.append(f"image signature {each.name}: {objection}")
            continue
        critical = said.critical
        found.append(Named(key.name, critical.image.digest, critical.identity.reference))
    return found, passed_over


def _read(found: Loose) -> _Payload:
    return as_model(_Payload, read_json(found.data, "payload"), "payload")


def _signer(found: Loose, trust: Trust | None) -> TrustedKey:
    sig = read_base64(found.signature, "signature")
    for key in trust.keys if trust else []:
        if holds(key.key, sig, found.data):
            return key
    raise RecordInvalid("no key of the trust file made it")


def judge_names(digest: str, names: Sequence[Named]) -> list[Node]:
    """A trusted signature that speaks of another image was put here by somebody."""
    nodes = []
    for name in names:
        title = f"image signature by {name.key}"
        if name.digest != digest:
            nodes.append(Node(title, Verdict.BROKEN, f"is about {name.digest}, not about this"))
        else:
            nodes.append(Node(title, words=f"as {name.reference}"))
    return nodes


def judge_tag(reference: str, digest: str, names: Sequence[Named], others: Sequence[Named]) -> Node:
    """Whether a trusted key says that this tag is this image; `others` are other images' names."""
    title = f"tag {reference.rpartition(':')[2]}"
    ours = [n for n in names if n.digest == digest]
    for name in ours:
        if name.reference == reference:
            return Node(title, words=f"names the digest that {name.key} signed under it")
    for name in others:
        if name.reference == reference and name.digest != digest:
            words = f"moved after signing: {name.key} signed {name.digest} under it"
            return Node(title, Verdict.MOVED, f"{words}, now it names {digest}")
    signed_as = ", ".join(sorted({n.reference for n in ours})) or "nothing"
    words = f"no trusted signature says that it is {digest} (signed as {signed_as})"
    return Node(title, Verdict.INCOMPLETE, words)
