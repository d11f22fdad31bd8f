"""Clearing a repository: what no kept tag and no evidence of a kept image reaches.

First a plan from reading only; an error while reading ends it before anything is deleted. A
registry lists tags but not manifests, so manifests without a tag are known only where an index,
a referrer or this store's own memory names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Literal

from pipeline.errors import NotInRegistry
from pipeline.model import Frozen
from pipeline.oci.document import Document
from pipeline.publish.known import KnownRepository
from pipeline.registry.referrers import listed_referrers
from pipeline.registry.repository import Repository
from pipeline.store.store import Store

# the fallback tag of referrers, and cosign's tags: `sha256-<hex>.sig`, `.att`, `.sbom`
_EVIDENCE_TAG = re.compile(r"sha256-([0-9a-f]{64})(?:\.[a-z0-9]+)?")


class Held(Frozen):
    """One manifest of a repository."""

    digest: str
    kind: Literal["manifest", "index"]
    tags: tuple[str, ...]
    size_bytes: int


class Plan(Frozen):
    """What stays and what goes, each with the tags that name it."""

    repository: str
    kept: tuple[Held, ...]
    gone: tuple[Held, ...]
    freed_bytes: int


class _Reader:
    """Documents of a repository, each read once."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.documents: dict[str, Document] = {}
        self._referrers: dict[str, list[str]] = {}

    def find(self, digest: str) -> Document | None:
        if digest not in self.documents:
            document = self._repository.find_manifest(digest)
            if document is None:
                return None
            self.documents[digest] = document
        return self.documents[digest]

    def referrers(self, digest: str) -> list[str]:
        if digest not in self._referrers:
            listed, _ = listed_referrers(self._repository, digest)
            self._referrers[digest] = [d.digest for d in listed]
        return self._referrers[digest]


def plan_gc(store: Store, repository: Repository, patterns: Sequence[str], jobs: int = 4) -> Plan:
    """Read tags and manifests, and plan to delete what no kept image reaches."""
    tags = repository.tags()
    # every tag must be readable: what cannot be read cannot be spared
    named = dict(zip(tags, repository.client.each(jobs, tags, repository.manifest), strict=True))
    plain = [t for t in tags if not _EVIDENCE_TAG.fullmatch(t)]
    chosen = [t for t in plain if any(fnmatchcase(t, p) for p in patterns)]
    # a mistyped pattern must not clear the whole repository
    if plain and not chosen:
        raise NotInRegistry(
            f"{repository}: no tag matches {' or '.join(patterns)}, so everything would be deleted",
            "Nothing was deleted. Name what is to stay with --keep.",
        )
    reader = _Reader(repository)
    reader.documents |= {d.digest: d for d in named.values()}
    evidence = _evidence_tags(named)
    kept = reach(reader, evidence, [named[t].digest for t in chosen])
    seen = KnownRepository(store, repository).manifests
    # all that can be found, minus what is kept, is what goes
    everything = reach(reader, evidence, [*(d.digest for d in named.values()), *seen])
    return _plan(repository, reader, named, kept, everything - kept)


def _evidence_tags(named: dict[str, Document]) -> dict[str, list[str]]:
    """For each image, the manifests behind the tags that carry its digest."""
    tags: dict[str, list[str]] = {}
    for tag, document in named.items():
        if match := _EVIDENCE_TAG.fullmatch(tag):
            tags.setdefault(f"sha256:{match[1]}", []).append(document.digest)
    return tags


def reach(reader: _Reader, evidence: dict[str, list[str]], roots: Iterable[str]) -> set[str]:
    """All manifests that a root leads to: below it, attached to it, or its subject."""
    reached: set[str] = set()
    todo = list(roots)
    while todo:
        digest = todo.pop()
        if digest in reached:
            continue
        document = reader.find(digest)
        if document is None:
            continue  # remembered or referred to, and deleted since
        reached.add(digest)
        todo += [d.digest for d in document.manifests]
        todo += [document.subject.digest] if document.subject else []
        todo += evidence.get(digest, [])
        # evidence of a kept image is kept, also evidence that others attached
        todo += reader.referrers(digest)
    return reached


def _plan(
    repository: Repository,
    reader: _Reader,
    named: dict[str, Document],
    kept: set[str],
    gone: set[str],
) -> Plan:
    def held(digests: set[str]) -> tuple[Held, ...]:
        rows = []
        for digest in sorted(digests):
            document = reader.documents[digest]
            tags = tuple(t for t, d in named.items() if d.digest == digest)
            size = len(document.data) + sum(b.size_bytes for b in document.blobs)
            rows.append(Held(digest=digest, kind=document.kind, tags=tags, size_bytes=size))
        # what a tag names goes first: a kill in the middle leaves no tag on something incomplete
        return tuple(sorted(rows, key=_rank))

    stays = {b.digest for d in kept for b in reader.documents[d].blobs}
    goes = {b.digest: b.size_bytes for d in gone for b in reader.documents[d].blobs}
    freed = sum(size for digest, size in goes.items() if digest not in stays)
    return Plan(repository=str(repository), kept=held(kept), gone=held(gone), freed_bytes=freed)


def _rank(held: Held) -> tuple[bool, bool, bool, str]:
    plain = any(not _EVIDENCE_TAG.fullmatch(t) for t in held.tags)
    # tagged images, then evidence tags, then the rest; indexes before their manifests
    return not plain, not held.tags, held.kind == "manifest", held.digest


def run_gc(store: Store, repository: Repository, plan: Plan) -> None:
    """Delete what the plan names, tagged manifests first."""
    for held in plan.gone:
        repository.delete_manifest(held.digest)
    KnownRepository(store, repository).forget(held.digest for held in plan.gone)
