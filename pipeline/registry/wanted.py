"""What belongs to an image in a registry: its documents, their blobs, and what is attached."""

from __future__ import annotations

from pipeline import log
from pipeline.errors import NotInRegistry, RegistryBroken
from pipeline.model import Frozen
from pipeline.oci.document import MOST_MANIFEST_BYTES, Descriptor, Document
from pipeline.oci.reference import Reference
from pipeline.registry.referrers import referrers
from pipeline.registry.repository import Repository, require_same

MOST_BYTES = 200 << 30


class Wanted(Frozen):
    """All that belongs to one image: its root document, those below it, and their blobs."""

    root: Document
    documents: tuple[Document, ...]
    platform: str | None = None  # of the root, where it was chosen from an index
    evidence: tuple[Document, ...] = ()

    @property
    def blobs(self) -> tuple[Descriptor, ...]:
        found = [b for d in (*self.documents, *self.evidence) for b in d.blobs]
        return tuple({b.digest: b for b in found}.values())

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
        entries = _entries(root, platform)
        for entry in entries:
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
    found = tuple(documents.values())
    evidence = _evidence(repository, {root.digest: root, **documents}) if with_evidence else ()
    root = chosen if platform is not None else root
    wanted = Wanted(root=root, documents=found, platform=platform, evidence=evidence)
    if wanted.size_bytes > most_bytes:
        limit = log.size(most_bytes)
        raise RegistryBroken(
            f"{repository}: the image is said to be {log.size(wanted.size_bytes)}",
            f"The limit is {limit}; nothing was fetched.",
        )
    return wanted


def _entries(root: Document, platform: str | None) -> list[Descriptor]:
    return list(root.manifests) if platform is None else [choose(root, platform)]


def choose(root: Document, platform: str) -> Descriptor:
    """The one image of an index that is for a platform."""
    found = [d for d in root.manifests if _fits(d.platform, platform)]
    if len(found) != 1:
        there = ", ".join(str(d.platform) for d in root.manifests) or "none"
        raise NotInRegistry(
            f"{root.digest}: has {len(found)} images for {platform} (there are: {there})"
        )
    return found[0]


def _fits(found: str | None, wanted: str) -> bool:
    return found == wanted or (wanted == "linux/arm64" and found == "linux/arm64/v8")


def _evidence(repository: Repository, subjects: dict[str, Document]) -> tuple[Document, ...]:
    found = [d for digest in subjects for d in referrers(repository, digest)]
    return tuple({d.digest: d for d in found if d.kind == "manifest"}.values())
