"""What this store has seen in repositories of registries.

It helps to mount a layer from another repository instead of sending it, and to find manifests
without a tag. It is a memory only: where a registry disagrees, the registry is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from pipeline.artifacts.registry.repository import Repository
from pipeline.artifacts.store.store import Store, read_own
from pipeline.core import log
from pipeline.core.errors import StoreDamaged
from pipeline.core.files import is_free
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of


class _SeenRepository(Frozen):
    """One repository, as a file of the store."""

    registry: str
    repository: str
    blobs: list[Digest] = []
    manifests: list[Digest] = []


class KnownRepository:
    """One repository as this store remembers it."""

    def __init__(self, store: Store, repository: Repository) -> None:
        self._store = store
        self._registry, self._name = repository.client.name, repository.name
        self._key = sha256_of(str(repository).encode()).removeprefix("sha256:")
        self._path = store.root / "published" / f"{self._key}.json"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Locks a repository for a publish or a cleanup; logs if it has to wait."""
        lock = f"published-{self._key[:32]}"
        if not is_free(self._store.root / "locks" / lock):
            log.say(f"Another command works on {self._registry}/{self._name}; waiting for it")
        with self._store.locked(lock):
            yield

    @property
    def manifests(self) -> list[str]:
        """The manifests that were pushed."""
        return list(self._seen().manifests)

    def remember(self, *, blobs: Iterable[str] = (), manifests: Iterable[str] = ()) -> None:
        """Add pushed blobs and manifests."""
        with self._store.locked("published"):
            before = self._seen()
            self._keep(sorted({*before.blobs, *blobs}), sorted({*before.manifests, *manifests}))

    def forget(self, manifests: Iterable[str]) -> None:
        """Remove deleted manifests; the registry's garbage collection may remove their blobs."""
        with self._store.locked("published"):
            # nobody knows any more whether the blobs are still there
            self._keep([], sorted(set(self._seen().manifests) - set(manifests)))

    def elsewhere(self) -> dict[str, str]:
        """For each blob, another repository of the same registry that had it."""
        repositories: dict[str, str] = {}
        for path in sorted(self._path.parent.glob("*.json")):
            seen = _read(path)
            if seen and seen.registry == self._registry and seen.repository != self._name:
                # a registry mounts a blob only from a repository that the login may read
                repositories |= dict.fromkeys(seen.blobs, seen.repository)
        return repositories

    def _seen(self) -> _SeenRepository:
        return _read(self._path) or _SeenRepository(registry=self._registry, repository=self._name)

    def _keep(self, blobs: list[str], manifests: list[str]) -> None:
        seen = _SeenRepository(
            registry=self._registry, repository=self._name, blobs=blobs, manifests=manifests
        )
        self._store.write(self._path, canonical_json(seen.model_dump()))


def _read(path: Path) -> _SeenRepository | None:
    try:
        return _SeenRepository.model_validate_json(read_own(path))
    except (OSError, StoreDamaged, ValidationError):
        return None
