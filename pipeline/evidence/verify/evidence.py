"""Collects evidence: envelopes beside an artifact, and everything attached to an image.

Every user who may push can attach anything to an image. We skip and name evidence of another image
or of an unknown kind; evidence of this image that cannot be read breaks the chain.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.artifacts.attest.cosign import (
    ENVELOPE_MEDIA,
    SIGNATURE_MEDIA,
    SIGNATURE_NOTE,
    UNGATED_MEDIA,
)
from pipeline.artifacts.attest.envelope import SUFFIX, Envelope, read_envelope
from pipeline.artifacts.attest.names import BILL_MEDIA
from pipeline.artifacts.attest.strict import MAX_BYTES, plain
from pipeline.artifacts.oci.document import (
    OCI_EMPTY,
    OCI_MANIFEST,
    Descriptor,
    Document,
    read_document,
)
from pipeline.core.errors import EvidenceBroken, NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.evidence.verify.artifact import read_bounded, read_layout_index, read_small

# as many as a set can list; who can push could attach millions
MOST_FILES = 1000


@dataclass(frozen=True)
class EvidenceItem:
    """One piece of evidence: an envelope, or why it cannot be read."""

    name: str
    envelope: Envelope | None
    error: str = ""


def read_item(name: str, data: bytes) -> EvidenceItem:
    """Parses bytes of unknown origin; a file's name can be as hostile as its bytes."""
    name = plain(name).replace("\n", " ")
    try:
        return EvidenceItem(name, read_envelope(data, name))
    except RecordInvalid as error:
        return EvidenceItem(name, None, str(error))


def distinct(items: Sequence[EvidenceItem]) -> list[EvidenceItem]:
    """Drops envelopes whose statement is also there with the same signatures and more.

    A registry also keeps a statement as it was before a second key signed it.
    """

    def is_less(one: EvidenceItem, other: EvidenceItem) -> bool:
        a, b = one.envelope, other.envelope
        if a is None or b is None or a.payload != b.payload:
            return False
        return set(a.signatures) <= set(b.signatures)

    chosen: list[EvidenceItem] = []
    for each in items:
        if not any(is_less(each, other) for other in chosen):
            chosen = [*(other for other in chosen if not is_less(other, each)), each]
    return chosen


def gather_envelopes(places: Sequence[Path]) -> list[EvidenceItem]:
    """Envelopes from files and folders, in order of their names."""
    paths: list[Path] = []
    for place in places:
        if place.is_dir():
            paths += sorted(place.glob(f"*{SUFFIX}"))
        elif place.exists():
            paths.append(place)
        else:
            hint = "Name an envelope (*.dsse.json), or a folder of them."
            raise EvidenceBroken(f"{place}: there is no such evidence", hint)
    if len(paths) > MOST_FILES:
        raise RecordInvalid(f"{len(paths)} pieces of evidence, more than {MOST_FILES}")
    items = []
    for path in paths:
        # reading a pipe would block, and a link may lead out of the folder
        if stat.S_ISREG(path.lstat().st_mode):
            items.append(read_item(path.name, read_bounded(path, MAX_BYTES)))
        else:
            items.append(EvidenceItem(plain(path.name), None, "is a link or not a plain file"))
    return items


def beside(artifact: Path) -> list[Path]:
    """Finds the evidence of a file or folder where `evidence attest` writes it."""
    places = [artifact.with_name(f"{artifact.name}{each}") for each in (SUFFIX, ".records")]
    if artifact.is_dir():
        places.append(artifact / "records")
    return [place for place in places if place.exists()]


@dataclass(frozen=True)
class AttachedBlob:
    """Attached bytes that are not an envelope: a signature's payload, an unsigned SBOM, a note."""

    name: str
    media_type: str
    data: bytes
    signature: str = ""


@dataclass
class AttachedEvidence:
    """Everything that is attached to one image."""

    items: list[EvidenceItem] = field(default_factory=list)
    signatures: list[AttachedBlob] = field(default_factory=list)
    bills: list[AttachedBlob] = field(default_factory=list)
    notes: list[AttachedBlob] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def read_attached(
    digest: str, documents: Iterable[Document], read: Callable[[Descriptor], bytes]
) -> AttachedEvidence:
    """Read the evidence for one image; each blob once, in whichever manifest it is listed."""
    attached = AttachedEvidence()
    places = {SIGNATURE_MEDIA: attached.signatures, UNGATED_MEDIA: attached.notes}
    places |= dict.fromkeys(BILL_MEDIA.values(), attached.bills)
    # two keys sign the same payload: one blob, two signatures
    layers: dict[tuple[str, str], Descriptor] = {}
    for document in documents:
        # cosign's tags hold manifests without a subject: the tag itself names the image
        subject = document.subject.digest if document.subject else digest
        if subject != digest:
            attached.skipped.append(f"{document.digest} is about {subject}")
            continue
        for layer in document.layers:
            layers.setdefault((layer.digest, layer.annotations.get(SIGNATURE_NOTE, "")), layer)
            if len(layers) > MOST_FILES:
                raise RecordInvalid(f"more than {MOST_FILES} pieces of evidence for {digest}")
    for (blob, signature), layer in layers.items():
        kind, name = layer.media_type, f"{blob[:19]}…"
        if kind != ENVELOPE_MEDIA and kind not in places:
            # every artifact without content has the empty blob
            if kind != OCI_EMPTY:
                attached.skipped.append(f"{name} has an unknown media type: {plain(kind)[:80]}")
            continue
        try:
            if layer.size_bytes > MAX_BYTES:
                raise RecordInvalid(f"larger than {MAX_BYTES} bytes")
            data = read(layer)
        except (RegistryBroken, NotInRegistry, EvidenceBroken, RecordInvalid) as error:
            # broken, not skipped: deleting the bytes of a failed gate must be noticed
            attached.items.append(EvidenceItem(name, None, str(error)))
            continue
        if kind == ENVELOPE_MEDIA:
            attached.items.append(read_item(name, data))
        else:
            places[kind].append(AttachedBlob(name, kind, data, signature))
    return attached


def attached_in(folder: Path, digest: str) -> AttachedEvidence:
    """Evidence that was pulled into an OCI layout folder along with the image."""
    blobs = folder / "blobs" / "sha256"
    documents, strays = [], []
    for entry in read_layout_index(folder).manifests:
        if entry.artifact_type is None or entry.media_type != OCI_MANIFEST:
            continue
        what = f"{folder.name}: manifest of a statement"
        try:
            document = read_document(read_small(blobs, entry.digest, entry.size_bytes, what))
        except RegistryBroken as error:
            raise EvidenceBroken(str(error)) from error
        if document.subject is None:
            strays.append(f"{entry.digest} is listed, but has no subject")
        else:
            documents.append(document)

    def read(blob: Descriptor) -> bytes:
        return read_small(blobs, blob.digest, blob.size_bytes, "statement", MAX_BYTES)

    attached = read_attached(digest, documents, read)
    attached.skipped[:0] = strays
    return attached
