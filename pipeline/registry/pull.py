"""An image from a registry by its digest, into an OCI layout or the store, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from pipeline import log
from pipeline.errors import NotInRegistry, RegistryBroken, StoreUnwritable
from pipeline.files import is_whole, keep, locked, os_errors_explained, write_bytes
from pipeline.model import Frozen
from pipeline.oci.document import (
    MOST_MANIFEST_BYTES,
    Descriptor,
    Document,
    index_json,
)
from pipeline.oci.layout import LAYOUT
from pipeline.oci.reference import Reference
from pipeline.registry.download import pull_blob
from pipeline.registry.referrers import kind_of, referrers
from pipeline.registry.repository import Repository, require_same

# Two pulls into one place would write into one file.
_LOCK = "pull.lock"


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


def missing_blobs(wanted: Wanted, blobs: BlobFolder) -> list[Descriptor]:
    """What a pull fetches: what is there and whole stays."""
    return [
        blob
        for blob in wanted.blobs
        if not is_whole(blobs.blob_path(blob.digest), blob.digest, blob.size_bytes)
    ]


def _fetch_blobs(repository: Repository, wanted: Wanted, blobs: BlobFolder, jobs: int) -> int:
    """Bring what is missing, in parallel, each blob checked; returns the bytes received."""
    todo = missing_blobs(wanted, blobs)
    total = sum(b.size_bytes for b in todo)
    with (
        log.step(f"Fetching {len(todo)} of {len(wanted.blobs)} blobs, {log.size(total)}"),
        log.progress("fetched", total) as bar,
    ):

        def bring(blob: Descriptor) -> None:
            partial = blobs.partial_path(blob.digest.removeprefix("sha256:"))
            pull_blob(repository, blob, partial, bar)
            keep(partial, blobs.blob_path(blob.digest))

        repository.client.each(jobs, todo, bring)
    for document in (*wanted.documents, *wanted.evidence):
        write_bytes(blobs.blob_path(document.digest), document.data)
    return total


def pull_layout(repository: Repository, wanted: Wanted, folder: Path, jobs: int = 4) -> Pulled:
    """Write an OCI layout; it has an index only once everything in it is there."""
    require_ours(folder)
    blobs, partial = LayoutBlobs(folder), folder / ".partial"
    with locked(partial / _LOCK):
        with os_errors_explained(folder):
            partial.mkdir(exist_ok=True)  # a pull that we waited for has removed it
        received = _fetch_blobs(repository, wanted, blobs, jobs)
        _write_index(wanted, folder)
        # only now: an interrupted pull leaves partial files, and the next one resumes them
        shutil.rmtree(partial, ignore_errors=True)
    return _pulled(wanted, received)


def _write_index(wanted: Wanted, folder: Path) -> None:
    entries = [_named(wanted.root, wanted.platform), *(_named(d) for d in wanted.evidence)]
    with os_errors_explained(folder):
        write_bytes(folder / "oci-layout", LAYOUT)
        write_bytes(folder / "index.json", index_json(entries))


def pull_into(repository: Repository, wanted: Wanted, blobs: BlobFolder, jobs: int = 4) -> int:
    """The same blobs into the store, where a build can stand on them; returns those received."""
    with locked(blobs.partial_path(_LOCK)):
        return _fetch_blobs(repository, wanted, blobs, jobs)


def _named(document: Document, platform: str | None = None) -> Descriptor:
    kind = kind_of(document) if document.subject else None
    changes = {"artifact_type": kind, "platform": platform}
    return document.descriptor.model_copy(update=changes)


def _pulled(wanted: Wanted, received: int) -> Pulled:
    platforms = [d.platform for d in wanted.root.manifests if d.platform]
    return Pulled(
        digest=wanted.root.digest,
        platforms=tuple(platforms),
        size_bytes=wanted.size_bytes,
        received_bytes=received,
        evidence=tuple(d.digest for d in wanted.evidence),
    )


def require_ours(folder: Path) -> None:
    """A new or empty folder, or a layout that an earlier pull began."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise StoreUnwritable(f"{folder}: is not a folder", "Name a new or empty folder.")
    # nothing of anybody's is overwritten, and an interrupted pull can be resumed
    known = {"blobs", ".partial", "oci-layout", "index.json"}
    if folder.exists() and not {p.name for p in folder.iterdir()} <= known:
        raise StoreUnwritable(f"{folder}: holds other files", "Name a new or empty folder.")


# engine images are tens of gigabytes; a forged size must not fill the disk
MOST_BYTES = 200 << 30


class Wanted(Frozen):
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


def resolve(repository: Repository, reference: Reference) -> Document:
    """The root document; a tag is only a way to find a digest, and must agree with one given."""
    if reference.digest:
        return repository.manifest(reference.digest)
    if not reference.tag:
        raise NotInRegistry(f"{reference}: names neither a tag nor a digest")
    return repository.manifest(reference.tag)


def plan_pull(
    repository: Repository,
    root: Document,
    platform: str | None = None,
    *,
    with_evidence: bool = False,
    most_bytes: int = MOST_BYTES,
) -> Wanted:
    """Read the documents of an image, of one platform or of all, and what they need."""
    documents = {root.digest: root}
    chosen = root
    if root.kind == "index":
        for entry in root.manifests if platform is None else [choose(root, platform)]:
            document = repository.manifest(
                entry.digest, min(entry.size_bytes or 1, MOST_MANIFEST_BYTES)
            )
            require_same(document, entry, str(repository))
            if document.kind != "manifest":
                raise RegistryBroken(f"{repository}: an index in an index is not followed")
            documents[document.digest] = document
            chosen = document
        if platform is not None:
            documents = {chosen.digest: chosen}
    chosen_documents = tuple(documents.values())
    evidence = _evidence(repository, {root.digest: root, **documents}) if with_evidence else ()
    root = chosen if platform is not None else root
    wanted = Wanted(root=root, documents=chosen_documents, platform=platform, evidence=evidence)
    # as the manifests claim; each blob is held to its claim when it comes
    if wanted.size_bytes > most_bytes:
        limit = log.size(most_bytes)
        raise RegistryBroken(
            f"{repository}: the image claims to be {log.size(wanted.size_bytes)}",
            f"The limit is {limit}; nothing was fetched.",
        )
    return wanted


def choose(root: Document, platform: str) -> Descriptor:
    """The one image of an index that is for a platform."""
    matches = [d for d in root.manifests if _fits(d.platform, platform)]
    if len(matches) != 1:
        there = ", ".join(str(d.platform) for d in root.manifests) or "none"
        raise NotInRegistry(
            f"{root.digest}: has {len(matches)} images for {platform} (there are: {there})"
        )
    return matches[0]


def _fits(platform: str | None, wanted: str) -> bool:
    # arm64 is v8; some tools write the variant, some do not
    return platform == wanted or (wanted == "linux/arm64" and platform == "linux/arm64/v8")


def _evidence(repository: Repository, subjects: dict[str, Document]) -> tuple[Document, ...]:
    attached = [d for digest in subjects for d in referrers(repository, digest)]
    return tuple({d.digest: d for d in attached if d.kind == "manifest"}.values())
