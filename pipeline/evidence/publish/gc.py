"""Clears a repository of what no kept tag and no evidence of a kept image reaches.

First plans by reading only; an error while reading ends it before it deletes anything. A
registry lists tags but not manifests, so manifests without a tag are known only where an index,
a referrer or this store's own memory names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pipeline.artifacts.registry.referrers import listed_referrers
from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import NotInRegistry
from pipeline.core.model import Frozen
from pipeline.evidence.publish.known import KnownRepository

# the fallback tag of referrers, and cosign's tags: `sha256-<hex>.sig`, `.att`, `.sbom`
_EVIDENCE_TAG = re.compile(r"sha256-([0-9a-f]{64})(?:\.[a-z0-9]+)?")


class Held(Frozen):
    """One manifest of a repository."""

    digest: str
    kind: Literal["manifest", "index"]
    tags: tuple[str, ...]
    size_bytes: int


class CleanPlan(Frozen):
    """What stays and what goes, each with the tags that name it."""

    repository: str
    kept: tuple[Held, ...]
    gone: tuple[Held, ...]
    freed_bytes: int


def plan_gc(
    store: Store, repository: Repository, patterns: Sequence[str], jobs: int = 4
) -> CleanPlan:
    """Read tags and manifests, and plan to delete what no kept image reaches."""
    tags = repository.tags()
    # every tag must be readable: a manifest that cannot be read cannot be spared
    named = dict(zip(tags, repository.client.each(jobs, tags, repository.manifest), strict=True))
    plain = [t for t in tags if not _EVIDENCE_TAG.fullmatch(t)]
    chosen = [t for t in plain if any(fnmatchcase(t, p) for p in patterns)]
    # a mistyped pattern must not clear the whole repository
    if plain and not chosen:
        wanted = " or ".join(patterns)
        message = f"{repository}: no tag matches {wanted}, so everything would be deleted"
        raise NotInRegistry(message, "Nothing was deleted. Name what is to stay with --keep.")
    # for each image, the manifests under the tags that carry its digest
    evidence: dict[str, list[str]] = {}
    for tag, document in named.items():
        if match := _EVIDENCE_TAG.fullmatch(tag):
            evidence.setdefault(f"sha256:{match[1]}", []).append(document.digest)
    # what a manifest leads to, each read once: below it, attached to it, or its subject
    documents = {d.digest: d for d in named.values()}
    leads_to: dict[str, list[str]] = {}

    def reach(roots: Iterable[str]) -> set[str]:
        reached: set[str] = set()
        todo = list(roots)
        while todo:
            digest = todo.pop()
            if digest in reached:
                continue
            document = documents.get(digest) or repository.find_manifest(digest)
            if document is None:
                continue  # remembered or referred to, and deleted since
            reached.add(digest)
            documents[digest] = document
            if digest not in leads_to:
                below = [*document.manifests, *([document.subject] if document.subject else [])]
                # evidence of a kept image is kept, also evidence that others attached
                below += listed_referrers(repository, digest)[0]
                leads_to[digest] = [d.digest for d in below] + evidence.get(digest, [])
            todo += leads_to[digest]
        return reached

    kept = reach(named[t].digest for t in chosen)
    # deletes everything that it finds and does not keep
    seen = KnownRepository(store, repository).manifests
    gone = reach([*(d.digest for d in named.values()), *seen]) - kept

    def held(digest: str) -> Held:
        document = documents[digest]
        own = tuple(t for t, d in named.items() if d.digest == digest)
        size = len(document.data) + sum(b.size_bytes for b in document.blobs)
        return Held(digest=digest, kind=document.kind, tags=own, size_bytes=size)

    stays = {b.digest for d in kept for b in documents[d].blobs}
    goes = {b.digest: b.size_bytes for d in gone for b in documents[d].blobs}
    return CleanPlan(
        repository=str(repository),
        kept=tuple(sorted(map(held, kept), key=_rank)),
        gone=tuple(sorted(map(held, gone), key=_rank)),
        freed_bytes=sum(size for digest, size in goes.items() if digest not in stays),
    )


def _rank(held: Held) -> tuple[bool, bool, bool, str]:
    """What a tag names goes first: a kill in the middle leaves no tag on something incomplete."""
    plain = any(not _EVIDENCE_TAG.fullmatch(t) for t in held.tags)
    # tagged images, then evidence tags, then the rest; indexes before their manifests
    return not plain, not held.tags, held.kind == "manifest", held.digest


def run_gc(store: Store, repository: Repository, plan: CleanPlan) -> None:
    """Delete what the plan names, tagged manifests first."""
    for held in plan.gone:
        repository.delete_manifest(held.digest)
    KnownRepository(store, repository).forget(held.digest for held in plan.gone)
