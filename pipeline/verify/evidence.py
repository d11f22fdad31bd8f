"""Collecting evidence: envelopes beside an artifact, and whatever is attached to an image.

Anybody who may push can attach anything to an image. What is about another image, or of an unknown
kind, is skipped and named; what is about this image and cannot be read breaks the chain.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.attest.cosign import ENVELOPE_MEDIA, SIGNATURE_MEDIA, SIGNATURE_NOTE, UNGATED_MEDIA
from pipeline.attest.envelope import SUFFIX, Envelope, read_envelope
from pipeline.attest.names import BILL_MEDIA
from pipeline.attest.strict import MAX_BYTES, plain
from pipeline.errors import EvidenceBroken, NotInRegistry, RecordInvalid, RegistryBroken
from pipeline.oci.document import OCI_EMPTY, OCI_MANIFEST, Descriptor, Document, read_document
from pipeline.verify.artifact import read_bounded, read_index, read_small

# as many as a set can list; who can push could attach millions
MOST_FILES = 1000


@dataclass(frozen=True)
class EvidenceItem:
    """One piece of evidence: an envelope, or why it cannot be read."""

    name: str
    envelope: Envelope | None
    error: str = ""


def read_item(name: str, data: bytes) -> EvidenceItem:
    """Bytes of unknown origin as evidence; a file's name can be as hostile as its bytes."""
    name = plain(name).replace("\n", " ")
    try:
        return EvidenceItem(name, read_envelope(data, name))
    except RecordInvalid as error:
        return EvidenceItem(name, None, str(error))


def distinct(items: Sequence[EvidenceItem]) -> list[EvidenceItem]:
    """Without envelopes whose statement is also there with the same signatures and more.

    A registry keeps a statement also as it was before a second key signed it.
    """
    kept: list[EvidenceItem] = []
    for each in items:
        if any(_is_less(each, other) for other in kept):
            continue
        kept = [*(other for other in kept if not _is_less(other, each)), each]
    return kept


def _is_less(one: EvidenceItem, other: EvidenceItem) -> bool:
    if one.envelope is None or other.envelope is None:
        return False
    same = one.envelope.payload == other.envelope.payload
    return same and set(one.envelope.signatures) <= set(other.envelope.signatures)


def gather(places: Sequence[Path]) -> list[EvidenceItem]:
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
    return [_read(path) for path in paths]


def _read(path: Path) -> EvidenceItem:
    # a pipe would be waited for, and a link may lead out of the folder
    if not stat.S_ISREG(path.lstat().st_mode):
        return EvidenceItem(plain(path.name), None, "is a link or not a plain file")
    return read_item(path.name, read_bounded(path, MAX_BYTES))


def beside(artifact: Path) -> list[Path]:
    """Where evidence of a file or folder is looked for unless it is named."""
    # `evidence attest FILE` puts it there
    places = [artifact.with_name(f"{artifact.name}{SUFFIX}")]
    places += [artifact.with_name(f"{artifact.name}.records")]
    if artifact.is_dir():
        places.append(artifact / "records")
    return [place for place in places if place.exists()]


Read = Callable[[Descriptor], bytes]
_UNREADABLE = (RegistryBroken, NotInRegistry, EvidenceBroken, RecordInvalid)


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


def read_attached(digest: str, documents: Iterable[Document], read: Read) -> AttachedEvidence:
    """Read the evidence for one image; each blob once, whoever lists it."""
    attached = AttachedEvidence()
    seen: set[tuple[str, str]] = set()
    for document in documents:
        # cosign's tags hold manifests without a subject: the tag itself names the image
        subject = document.subject.digest if document.subject else digest
        if subject != digest:
            attached.skipped.append(f"{document.digest} is about {subject}")
            continue
        for layer in document.layers:
            # two keys sign the same payload: one blob, two signatures
            key = layer.digest, layer.annotations.get(SIGNATURE_NOTE, "")
            if key in seen:
                continue
            seen.add(key)
            if len(seen) > MOST_FILES:
                raise RecordInvalid(f"more than {MOST_FILES} pieces of evidence for {digest}")
            _take(attached, layer, read)
    return attached


def _take(attached: AttachedEvidence, layer: Descriptor, read: Read) -> None:
    kind, name = layer.media_type, f"{layer.digest[:19]}…"
    places = {SIGNATURE_MEDIA: attached.signatures, UNGATED_MEDIA: attached.notes}
    places |= dict.fromkeys(BILL_MEDIA.values(), attached.bills)
    if kind != ENVELOPE_MEDIA and kind not in places:
        # every artifact without content has this blob
        if kind != OCI_EMPTY:
            attached.skipped.append(f"{name} has an unknown media type: {plain(kind)[:80]}")
        return
    try:
        if layer.size_bytes > MAX_BYTES:
            raise RecordInvalid(f"larger than {MAX_BYTES} bytes")
        data = read(layer)
    except _UNREADABLE as error:
        # broken, not skipped: deleting the bytes of a failed gate must be noticed
        attached.items.append(EvidenceItem(name, None, str(error)))
        return
    if kind == ENVELOPE_MEDIA:
        attached.items.append(read_item(name, data))
        return
    signature = layer.annotations.get(SIGNATURE_NOTE, "")
    places[kind].append(AttachedBlob(name, kind, data, signature))


def attached_in(folder: Path, digest: str) -> AttachedEvidence:
    """Evidence that was pulled into an OCI layout folder along with the image."""
    blobs = folder / "blobs" / "sha256"
    documents, strays = [], []
    for entry in read_index(folder).manifests:
        if entry.artifact_type is None or entry.media_type != OCI_MANIFEST:
            continue
        what = f"{folder.name}: manifest of a statement"
        document = _document(read_small(blobs, entry.digest, entry.size_bytes, what))
        if document.subject is None:
            strays.append(f"{entry.digest} is listed, but has no subject")
        else:
            documents.append(document)

    def read(blob: Descriptor) -> bytes:
        return read_small(blobs, blob.digest, blob.size_bytes, "statement", MAX_BYTES)

    attached = read_attached(digest, documents, read)
    attached.skipped[:0] = strays
    return attached


def _document(data: bytes) -> Document:
    try:
        return read_document(data)
    except RegistryBroken as error:
        raise EvidenceBroken(str(error)) from error
