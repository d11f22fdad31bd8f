"""A package as it is recorded, against the pin of its lock."""

from __future__ import annotations

from urllib.parse import unquote

from pipeline.evidence.provenance import Resource
from pipeline.lock.model import DebPin, Pin
from pipeline.verify.verdict import Node, Verdict


def judge_pin(resource: Resource, pin: Pin, purl: str) -> Node:
    """A package is recorded with the name, version and size of its pin."""
    kind = "deb/debian" if isinstance(pin, DebPin) else "pypi"
    # qualifiers of a package URL repeat what is compared here
    recorded = [resource.name, unquote(purl.partition("?")[0])]
    recorded.append(str(resource.annotations.get("sizeBytes")))
    want = [pin.file, f"pkg:{kind}/{pin.name}@{pin.version}", str(pin.size_bytes)]
    for got, wanted in zip(recorded, want, strict=True):
        if got != wanted:
            return Node(pin.file, Verdict.BROKEN, f"is recorded as {got}, but locked as {wanted}")
    return Node(resource.name)
