"""Which repositories of a registry hold what, as far as this store saw it.

Used to mount a layer from a neighbour instead of sending it, and to find manifests that no tag
names. It is a memory, not a truth: a registry that says otherwise is believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from pipeline import log
from pipeline.errors import StoreDamaged
from pipeline.files import is_free
from pipeline.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.store.store import Store, read_own


class Seen(Frozen):
    """One repository."""

    registry: str
    repository: str
    blobs: list[Digest] = []
    manifests: list[Digest] = []


def seen_in(store: Store, registry: str, repository: str) -> Seen:
    """What was seen in a repository."""
    empty = Seen(registry=registry, repository=repository)
    return _read(_path(store, registry, repository)) or empty


def remember(
    store: Store,
    registry: str,
    repository: str,
    *,
    blobs: Iterable[str] = (),
    manifests: Iterable[str] = (),
) -> None:
    """Add what was seen."""
    with store.locked("published"):
        before = seen_in(store, registry, repository)
        now = Seen(
            registry=registry,
            repository=repository,
            blobs=sorted({*before.blobs, *blobs}),
            manifests=sorted({*before.manifests, *manifests}),
        )
        store.write(_path(store, registry, repository), canonical_json(now.model_dump()))


def forget(store: Store, registry: str, repository: str, manifests: Iterable[str]) -> None:
    """Take deleted manifests out; their blobs may go with the registry's own clearing."""
    with store.locked("published"):
        before = seen_in(store, registry, repository)
        left = sorted(set(before.manifests) - set(manifests))
        now = before.model_copy(update={"manifests": left, "blobs": []})
        store.write(_path(store, registry, repository), canonical_json(now.model_dump()))


def neighbours(store: Store, registry: str, repository: str) -> dict[str, str]:
    """For each blob, another repository of the same registry that had it."""
    found: dict[str, str] = {}
    for path in sorted((store.root / "published").glob("*.json")):
        seen = _read(path)
        if seen and seen.registry == registry and seen.repository != repository:
            found |= dict.fromkeys(seen.blobs, seen.repository)
    return found


@contextmanager
def alone_in(store: Store, registry: str, repository: str) -> Iterator[None]:
    """Held while a repository is published to or cleared; who has to wait is told why."""
    name = f"published-{_key(registry, repository)[:32]}"
    if not is_free(store.root / "locks" / name):
        log.say(f"Another command is at work on {registry}/{repository}; waiting for it")
    with store.locked(name):
        yield


def _path(store: Store, registry: str, repository: str) -> Path:
    return store.root / "published" / f"{_key(registry, repository)}.json"


def _key(registry: str, repository: str) -> str:
    return sha256_of(f"{registry}/{repository}".encode()).removeprefix("sha256:")


def _read(path: Path) -> Seen | None:
    try:
        return Seen.model_validate_json(read_own(path))
    except (OSError, StoreDamaged, ValidationError):
        return None
