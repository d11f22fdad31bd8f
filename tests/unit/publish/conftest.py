"""A store with two small images, and orders to publish them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.model import canonical_json
from pipeline.evidence.publish.publish import PublishOrder, plan_upload
from pipeline.images.assemble.image import Built
from tests.makers import built_image
from tests.testbed.oci_door import Door
from tests.unit.registry.support import NAME, manifest_json, repository_at

MakeOrder = Callable[..., PublishOrder]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def keep_image(store: Store, platform: str, *layers: bytes, name: str = "app") -> Built:
    """An image in the store, as a build leaves it."""
    config = json.dumps({"architecture": platform, "name": name}).encode()
    notes = {"org.opencontainers.image.title": name, "own": platform}
    digest = store.put_blob(canonical_json(manifest_json(config, *layers, annotations=notes)))
    for data in (config, *layers):
        store.put_blob(data)
    return built_image(name, platform, digest)


def some_bytes(seed: str, n_bytes: int) -> bytes:
    """The same bytes for the same seed."""
    return hashlib.shake_128(seed.encode()).digest(n_bytes)


@pytest.fixture
def built(store: Store) -> list[Built]:
    shared = some_bytes("shared", 3000)
    return [
        keep_image(store, "linux/amd64", shared, some_bytes("amd", 5000)),
        keep_image(store, "linux/arm64", shared, some_bytes("arm", 5000)),
    ]


@pytest.fixture
def order(store: Store, built: list[Built], door: Door) -> MakeOrder:
    """An order for both platforms, changed as a test likes."""

    def make(name: str = NAME, **changes: object) -> PublishOrder:
        values = {
            "shipment": plan_upload(store, built),
            "repository": repository_at(door, name),
            "tag": "v1",
            "gates": [],
            "jobs": 2,
            **changes,
        }
        return PublishOrder(**values)  # type: ignore[arg-type]

    return make
