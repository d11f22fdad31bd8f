"""What is attached to an image, told apart: evidence by kind, and what does not belong to it.

Anybody who may push can attach anything. What is not about this image, or of no kind that is known
here, is passed over and named; what is about it and cannot be read breaks the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeline.attest.cosign import ENVELOPE_MEDIA, SIGNATURE_MEDIA, SIGNATURE_NOTE, UNGATED_MEDIA
from pipeline.attest.names import BILL_MEDIA
from pipeline.attest.strict import MAX_BYTES, plain
from pipeline.errors import EvidenceBroken, NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.oci.document import OCI_EMPTY, Descriptor, Document
from pipeline.verify.evidence import MOST_FILES, EvidenceItem, read_item

Read = Callable[[Descriptor], bytes]
_UNREADABLE = (RegistryBroken, NotInRegistry, EvidenceBroken, RecordInvalid)


@dataclass(frozen=True)
class Loose:
    """A piece that is no envelope: a signature's payload, a plain bill, a note."""

    name: str
    media_type: str
    data: bytes
    signature: str = ""


@dataclass
class Attached:
    """Everything that was found for one image."""

    items: list[EvidenceItem] = field(default_factory=list)
    signatures: list[Loose] = field(default_factory=list)
    bills: list[Loose] = field(default_factory=list)
    notes: list[Loose] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


def sort_out(digest: str, documents: Iterable[Document], read: Read) -> Attached:
    """Read the evidence for one image; each blob once, whoever lists it."""
    found = Attached()
    seen: set[tuple[str, str]] = set()
    for document in documents:
        subject = document.subject.digest if document.subject else digest
        if subject != digest:
            found.passed_over.append(f"{document.digest} is about {subject}")
            continue
        for layer in document.layers:
            key = layer.digest, layer.annotations.get(SIGNATURE_NOTE, "")
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > MOST_FILES:
                raise RecordInvalid(f"more than {MOST_FILES} pieces of evidence for {digest}")
            _take(found, layer, read)
    return found


def _take(found: Attached, layer: Descriptor, read: Read) -> None:
    kind, name = layer.media_type, f"{layer.digest[:19]}…"
    places = {SIGNATURE_MEDIA: found.signatures, UNGATED_MEDIA: found.notes}
    places |= dict.fromkeys(BILL_MEDIA.values(), found.bills)
    if kind != ENVELOPE_MEDIA and kind not in places:
        if kind != OCI_EMPTY:
            found.passed_over.append(f"{name} is of a kind not known here: {plain(kind)[:80]}")
        return
    try:
        if layer.size_bytes > MAX_BYTES:
            raise RecordInvalid(f"larger than {MAX_BYTES} bytes")
        data = read(layer)
    except _UNREADABLE as error:
        found.items.append(EvidenceItem(name, None, str(error)))
        return
    if kind == ENVELOPE_MEDIA:
        found.items.append(read_item(name, data))
        return
    signature = layer.annotations.get(SIGNATURE_NOTE, "")
    places[kind].append(Loose(name, kind, data, signature))
