"""Foreign base images: looked up once for a lock, then brought into the store by digest.

A lock names no place, so any folder or registry that has the right bytes will do: folders that
hold blobs by hash (an OCI layout is one), then the configured registries, in order.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.errors import (
    BaseUnplaced,
    BaseUnusable,
    NotInRegistry,
    OfflineMiss,
    PipelineError,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
    SourceUnreachable,
)
from pipeline.fetch.base_pin import blob_pin, config_of, layer_pins, pin_of, require_locked
from pipeline.files import is_whole, os_errors_explained, sha256_of_file
from pipeline.lock.model import BasePin, BlobPin
from pipeline.model import sha256_of
from pipeline.oci.config import MOST_CONFIG_BYTES, read_config
from pipeline.oci.document import (
    MOST_MANIFEST_BYTES,
    Descriptor,
    Document,
    read_document,
)
from pipeline.oci.reference import parse_repository
from pipeline.registry.client import Access, RegistryClient
from pipeline.registry.pull import MOST_BYTES, Wanted, choose, pull_into
from pipeline.registry.repository import Repository
from pipeline.spec.base import ForeignBase
from pipeline.store.store import Store

Result = TypeVar("Result")
# Failures of one registry after which the next one is asked.
_ELSEWHERE = (NotInRegistry, RegistryUnreachable, RegistryRefused, RegistryBroken)


@dataclass(frozen=True)
class BaseSettings:
    """Where foreign bases may be: folders with blobs, and registries by name."""

    folders: tuple[Path, ...] = ()
    registries: tuple[str, ...] = ()  # REGISTRY or REGISTRY/PREFIX
    access: Access | None = None
    jobs: int = 4


class Bases:
    """Brings foreign bases into the store."""

    def __init__(self, store: Store, settings: BaseSettings, *, offline: bool = False) -> None:
        self._store, self._settings, self._offline = store, settings, offline
        self._open: dict[str, Repository] = {}

    def resolve(self, base: ForeignBase, platform: str) -> BasePin:
        """The base for one platform, with the digest of every part; its layers are not read."""
        root = self._document(base.repository, base.digest)
        manifest = root
        if root.kind == "index":
            entry = choose(root, platform)
            manifest = self._document(base.repository, entry.digest)
            if manifest.kind != "manifest" or len(manifest.data) != entry.size_bytes:
                raise BaseUnusable(f"{base}: {entry.digest} does not match its index")
        config = read_config(self._config(base.repository, config_of(base, manifest)))
        return BasePin(
            repository=base.repository,
            index=pin_of(root) if root.kind == "index" else None,
            manifest=pin_of(manifest),
            config=blob_pin(config_of(base, manifest)),
            layers=layer_pins(base, manifest, config, platform),
        )

    def bring(self, pin: BasePin) -> None:
        """All documents and blobs of a locked base into the store; what is there is not asked."""
        index = self._document(pin.repository, pin.index.digest) if pin.index else None
        manifest = self._document(pin.repository, pin.manifest.digest)
        require_locked(pin, index, manifest)
        for document in (*([index] if index else []), manifest):
            self._store.put_blob(document.data)
        missing = [
            blob
            for blob in pin.blobs
            if not is_whole(self._store.blob_path(blob.digest), blob.digest, blob.size_bytes)
        ]
        self._store.need_space(sum(b.size_bytes for b in missing))
        missing = [b for b in missing if not self._copied(b)]
        if not missing:
            return
        if self._offline:
            raise OfflineMiss(
                f"{pin}: {len(missing)} of its {len(pin.blobs)} blobs are not in the store"
            )
        wanted = Wanted(root=manifest, documents=(manifest,))
        if wanted.size_bytes > MOST_BYTES:
            raise BaseUnusable(
                f"{pin}: claims to have {wanted.size_bytes} bytes, which is too much"
            )
        self._from_registries(
            pin.repository,
            str(pin),
            lambda there: pull_into(there, wanted, self._store, self._settings.jobs),
        )

    def _document(self, repository: str, digest: str) -> Document:
        """A manifest or index by its digest, from the nearest place that has it."""
        if (data := self._near(digest, MOST_MANIFEST_BYTES)) is not None:
            return read_document(data)
        self._require_online(repository, digest)
        return self._from_registries(
            repository, f"{repository}@{digest}", lambda there: there.manifest(digest)
        )

    def _config(self, repository: str, blob: Descriptor) -> bytes:
        if (data := self._near(blob.digest, MOST_CONFIG_BYTES)) is not None:
            return data
        self._require_online(repository, blob.digest)
        return self._from_registries(
            repository,
            f"{repository}@{blob.digest}",
            lambda there: there.read_blob(blob, MOST_CONFIG_BYTES),
        )

    def _require_online(self, repository: str, digest: str) -> None:
        if self._offline:
            raise OfflineMiss(
                f"{repository}@{digest}: this part of the base image is not in the store"
            )

    def _near(self, digest: str, most_bytes: int) -> bytes | None:
        """A small blob of the store or of a folder, if its bytes have this digest."""
        for path in [self._store.blob_path(digest), *self._in_folders(digest)]:
            is_small = path.is_file() and path.stat().st_size <= most_bytes
            if is_small and sha256_of(data := path.read_bytes()) == digest:
                return data
        return None

    def _in_folders(self, digest: str) -> list[Path]:
        name = digest.removeprefix("sha256:")
        places = (Path(name), Path("sha256") / name, Path("blobs") / "sha256" / name)
        return [folder / place for folder in self._settings.folders for place in places]

    def _copied(self, blob: BlobPin) -> bool:
        """Whether a folder had the blob; its bytes are judged like any others."""
        for path in self._in_folders(blob.digest):
            if path.is_file() and path.stat().st_size == blob.size_bytes:
                with self._store.new_blob() as new:
                    with os_errors_explained(new.path):
                        shutil.copyfile(path, new.path)
                    if sha256_of_file(new.path) == blob.digest:
                        new.keep(blob.digest)
                        return True
        return False

    def _from_registries(
        self, repository: str, what: str, ask: Callable[[Repository], Result]
    ) -> Result:
        """The first registry's good answer; else the most telling of the others."""
        if not self._settings.registries:
            raise BaseUnplaced(f"{what}: no registry is configured that could have it")
        failures: list[PipelineError] = []
        for place in self._settings.registries:
            try:
                return ask(self._repository(place, repository))
            except _ELSEWHERE as error:
                failures.append(error)
        raise _verdict(what, failures)

    def _repository(self, place: str, repository: str) -> Repository:
        name = f"{place.rstrip('/')}/{repository}"
        if name not in self._open:
            reference = parse_repository(name)
            client = RegistryClient(reference, self._settings.access)
            self._open[name] = Repository(client, reference.repository)
        return self._open[name]


def _verdict(what: str, failures: Sequence[PipelineError]) -> PipelineError:
    broken = [f for f in failures if isinstance(f, RegistryBroken)]
    if broken or len(failures) == 1:
        return (broken or failures)[0]
    return SourceUnreachable(f"{what}: {'; '.join(str(f) for f in failures)}")
