"""Pulls an image by its digest into an OCI layout or the store, byte for byte.

It resumes a blob after a break, and keeps it only if its digest matches.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Protocol

from pipeline.artifacts.oci.document import MOST_MANIFEST_BYTES, Descriptor, Document, index_json
from pipeline.artifacts.oci.layout import LAYOUT
from pipeline.artifacts.oci.reference import ImageReference
from pipeline.artifacts.registry.client import RegistryRequest
from pipeline.artifacts.registry.referrers import artifact_kind, referrers
from pipeline.artifacts.registry.repository import Repository
from pipeline.core import log
from pipeline.core.errors import NotInRegistry, RegistryBroken, RegistryUnreachable, StoreUnwritable
from pipeline.core.files import is_whole, keep_file, locked, os_errors_explained, write_bytes
from pipeline.core.log import Bar, Gauge
from pipeline.core.model import Frozen
from pipeline.core.net.answer import Answer
from pipeline.core.net.download import download_blob, pour, require_length
from pipeline.core.net.failures import BadAnswer, Lost

# Two pulls into one place would write into one file.
_LOCK = "pull.lock"
# engine images are tens of gigabytes; a forged size must not fill the disk
MOST_BYTES = 200 << 30


class BlobFolder(Protocol):
    """Where blobs go: the store, or a layout folder."""

    def blob_path(self, digest: str) -> Path: ...

    def partial_path(self, sha256: str) -> Path: ...


class LayoutBlobs:
    """The blobs of an OCI layout folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def blob_path(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def partial_path(self, sha256: str) -> Path:
        return self.folder / ".partial" / sha256


class Pulled(Frozen):
    """The result of a pull."""

    digest: str
    platforms: tuple[str, ...]
    size_bytes: int
    received_bytes: int
    evidence: tuple[str, ...] = ()


class WantedImage(Frozen):
    """All that belongs to one image: its root document, those below it, and their blobs."""

    root: Document
    documents: tuple[Document, ...]
    platform: str | None = None  # of the root, where it was chosen from an index
    evidence: tuple[Document, ...] = ()

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        blobs = [b for d in (*self.documents, *self.evidence) for b in d.blobs]
        return tuple({b.digest: b for b in blobs}.values())

    @property
    def size_bytes(self) -> int:
        return sum(b.size_bytes for b in self.blobs)


def resolve(repository: Repository, reference: ImageReference) -> Document:
    """Finds the root document: by its digest where the reference has one, else by its tag."""
    name = reference.digest or reference.tag
    if not name:
        raise NotInRegistry(f"{reference}: names neither a tag nor a digest")
    return repository.manifest(name)


def plan_pull(
    repository: Repository,
    root: Document,
    platform: str | None = None,
    *,
    with_evidence: bool = False,
    most_bytes: int = MOST_BYTES,
) -> WantedImage:
    """Reads the documents of an image, of one platform or of all, and what they need."""
    found = {root.digest: root}
    if root.kind == "index":
        for entry in root.manifests if platform is None else [choose(root, platform)]:
            limit = min(entry.size_bytes or 1, MOST_MANIFEST_BYTES)
            document = repository.manifest(entry.digest, limit)
            if document.digest != entry.digest or len(document.data) != entry.size_bytes:
                message = f"{entry.digest} differs from the descriptor that names it"
                raise RegistryBroken(f"{repository}: {message}")
            if document.kind != "manifest":
                raise RegistryBroken(f"{repository}: an index in an index is not followed")
            found[document.digest] = document
    documents, evidence = tuple(found.values()), dict[str, Document]()
    if with_evidence:
        attached = [d for digest in found for d in referrers(repository, digest)]
        evidence = {d.digest: d for d in attached if d.kind == "manifest"}
    if platform is not None:
        # of an index, only the document that was chosen
        documents = documents[-1:]
    wanted = WantedImage(
        root=documents[0],
        documents=documents,
        platform=platform,
        evidence=tuple(evidence.values()),
    )
    # as the manifests claim; each blob is held to its claim when it comes
    if wanted.size_bytes > most_bytes:
        message = f"{repository}: the image claims to be {log.size(wanted.size_bytes)}"
        raise RegistryBroken(message, f"The limit is {log.size(most_bytes)}; nothing was fetched.")
    return wanted


def choose(root: Document, platform: str) -> Descriptor:
    """The one image of an index that is for a platform."""
    # arm64 is v8; some tools write the variant, some do not
    names = {platform, "linux/arm64/v8"} if platform == "linux/arm64" else {platform}
    matches = [d for d in root.manifests if d.platform in names]
    if len(matches) != 1:
        listed = ", ".join(str(d.platform) for d in root.manifests) or "none"
        message = f"{root.digest}: has {len(matches)} images for {platform} (there are: {listed})"
        raise NotInRegistry(message)
    return matches[0]


def receive_blob(repository: Repository, blob: Descriptor, partial: Path | None, bar: Bar) -> None:
    """Completes `partial` to the verified blob; fetches only the bytes that it lacks.

    Without such a file, it reads the blob, compares it with its digest, and keeps nothing.
    """
    place, scope = f"{repository.path}/blobs/{blob.digest}", repository.may("pull")
    gauge, retry_policy, size_bytes = Gauge(bar), repository.client.retry_policy, blob.size_bytes

    def open_at(start: int) -> Answer:
        part = {"Range": f"bytes={start}-"} if start else {}
        good = (200, 206, 416) if start else (200,)
        return repository.client.once(RegistryRequest("GET", place, scope, good, part))

    def once() -> str:
        gauge.at(0)
        with open_at(0) as answer:
            require_length(answer, size_bytes)
            return pour(answer, hashlib.sha256(), 0, size_bytes, gauge)

    try:
        if partial is None:
            got = retry_policy.retried(once)
        else:
            got = download_blob(open_at, partial, blob.digest, size_bytes, gauge, retry_policy)
    except BadAnswer as error:
        raise RegistryBroken(f"{blob.digest}: {error}") from error
    except Lost as lost:
        raise RegistryUnreachable(f"{repository}: {lost}") from lost
    if got != blob.digest:
        raise RegistryBroken(f"{blob.digest}: received {got}")


def pull_into(repository: Repository, wanted: WantedImage, blobs: BlobFolder, jobs: int = 4) -> int:
    """Brings the missing blobs into the store; returns the bytes received."""
    with locked(blobs.partial_path(_LOCK)):
        return _fetch_blobs(repository, wanted, blobs, jobs)


def _fetch_blobs(repository: Repository, wanted: WantedImage, blobs: BlobFolder, jobs: int) -> int:
    """Brings what is missing, in parallel, each blob checked; returns the bytes received."""
    place = blobs.blob_path
    # blobs that are there and whole stay
    todo = [b for b in wanted.blobs if not is_whole(place(b.digest), b.digest, b.size_bytes)]
    total = sum(b.size_bytes for b in todo)
    with (
        log.step(f"Fetching {len(todo)} of {len(wanted.blobs)} blobs, {log.size(total)}"),
        log.progress("fetched", total) as bar,
    ):

        def bring(blob: Descriptor) -> None:
            partial = blobs.partial_path(blob.digest.removeprefix("sha256:"))
            receive_blob(repository, blob, partial, bar)
            keep_file(partial, place(blob.digest))

        repository.client.each(jobs, todo, bring)
    for document in (*wanted.documents, *wanted.evidence):
        write_bytes(place(document.digest), document.data)
    return total


def pull_layout(repository: Repository, wanted: WantedImage, folder: Path, jobs: int = 4) -> Pulled:
    """Writes an OCI layout; it has an index only once everything in it is there."""
    hint = "Name a new or empty folder."
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StoreUnwritable(f"{folder}: is not a folder", hint)
    # overwrites no other files, and an interrupted pull can be resumed
    known = {"blobs", ".partial", "oci-layout", "index.json"}
    if folder.exists() and not {p.name for p in folder.iterdir()} <= known:
        raise StoreUnwritable(f"{folder}: holds other files", hint)
    partial = folder / ".partial"
    entries = []
    for document in (wanted.root, *wanted.evidence):
        kind = artifact_kind(document) if document.subject else None
        platform = wanted.platform if document is wanted.root else None
        changes = {"artifact_type": kind, "platform": platform}
        entries.append(document.descriptor.model_copy(update=changes))
    with locked(partial / _LOCK):
        with os_errors_explained(folder):
            partial.mkdir(exist_ok=True)  # a pull that we waited for has removed it
        received = _fetch_blobs(repository, wanted, LayoutBlobs(folder), jobs)
        with os_errors_explained(folder):
            write_bytes(folder / "oci-layout", LAYOUT)
            write_bytes(folder / "index.json", index_json(entries))
        # only now: an interrupted pull leaves partial files, and the next one resumes them
        shutil.rmtree(partial, ignore_errors=True)
    return Pulled(
        digest=wanted.root.digest,
        platforms=tuple(d.platform for d in wanted.root.manifests if d.platform),
        size_bytes=wanted.size_bytes,
        received_bytes=received,
        evidence=tuple(d.digest for d in wanted.evidence),
    )
