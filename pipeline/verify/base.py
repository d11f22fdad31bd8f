"""A foreign base in an image's evidence: its layers at the bottom, its digest as in spec and lock.

What such a base holds is not known here. That is only ever valid where the trust file takes this
very digest as published, and says why.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.attest.trust import Trust
from pipeline.evidence.provenance import Provenance, Resource
from pipeline.lock.model import BasePin, ImageLock
from pipeline.spec.base import ForeignBase, parse_foreign
from pipeline.verify.artifact import Artifact
from pipeline.verify.verdict import Node, Verdict


def judge_base(
    found: Provenance,
    locks: Mapping[str, ImageLock | str],
    artifact: Artifact,
    trust: Trust | None,
) -> list[Node]:
    """Nothing for images on a root of ours; else the base, as far as the evidence leads."""
    specified = _specified(found)
    recorded = found.bases
    if not specified and not recorded:
        return []
    if len(specified) != 1 or len(recorded) != 1:
        words = f"{len(specified)} are asked for, {len(recorded)} recorded"
        return [Node("base image", Verdict.BROKEN, words)]
    [(image, spec)], [resource] = specified.items(), recorded
    title = f"base image {spec.repository}@sha256:{resource.sha256}"
    if problem := _contradiction(resource, image, spec, artifact):
        return [Node(title, Verdict.BROKEN, problem)]
    count = len(resource.annotations["layers"])
    children = (_locked(resource, image, found, locks), _contents(resource, trust))
    return [Node(title, words=f"its {count} layers at the bottom, unchanged", children=children)]


def _specified(found: Provenance) -> dict[str, ForeignBase]:
    bases = {
        name: parse_foreign(str(each.spec.get("base") or ""))
        for name, each in found.definition.external.images.items()
    }
    return {name: base for name, base in bases.items() if base}


def _contradiction(resource: Resource, image: str, spec: ForeignBase, artifact: Artifact) -> str:
    notes = resource.annotations
    if resource.name != spec.repository or notes.get("image") != image:
        return f"is recorded as {resource.name} of {notes.get('image')}"
    if spec.digest not in (f"sha256:{resource.sha256}", notes.get("index")):
        return f"the spec names {spec.digest}"
    layers, present = notes.get("layers"), list(artifact.layers or ())
    if not isinstance(layers, list) or not layers or present[: len(layers)] != layers:
        return "its layers are not at the bottom of this image"
    return ""


def _locked(
    resource: Resource, image: str, found: Provenance, locks: Mapping[str, ImageLock | str]
) -> Node:
    title, lock = "locked", locks.get(image, "there is no lock to compare it with")
    if isinstance(lock, str):
        return Node(title, Verdict.INCOMPLETE, lock)
    if lock.base_image is not None and _said(resource) == _said_by(lock.base_image):
        return Node(title)
    if lock.seal == found.locks.get(image):
        return Node(title, Verdict.BROKEN, "the lock that the record names says otherwise")
    return Node(title, Verdict.STALE, "another base is locked now")


def _said(resource: Resource) -> list[object]:
    notes = resource.annotations
    return [f"sha256:{resource.sha256}", notes.get("config"), notes.get("layers")]


def _said_by(pin: BasePin) -> list[object]:
    return [pin.manifest.digest, pin.config.digest, [layer.digest for layer in pin.layers]]


def _contents(resource: Resource, trust: Trust | None) -> Node:
    title = "what it holds"
    digests = (f"sha256:{resource.sha256}", str(resource.annotations.get("index")))
    reasons = [trust.bases[d] for d in digests if trust and d in trust.bases]
    if reasons:
        return Node(title, words=f"taken as published: {reasons[0]}")
    words = "unknown; a trust file can take this digest as published, under `bases`"
    return Node(title, Verdict.INCOMPLETE, words)
