"""A small Hub, a locked set on it, and a fetch that does not wait long."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.weights.disk import receipt
from pipeline.weights.hub import Hub
from pipeline.weights.model import FilePin, WeightsLock, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import LockedFolder, new_place
from pipeline.weights.transfer.fetch import fetch_files
from pipeline.weights.transfer.sources import find_routes
from pipeline.weights.transfer.workers import Options
from tests.testbed.hub import TestHub, test_hub

TOKEN = "hf_only-for-the-hub"
RANGE_BYTES = 1 << 16
BIG, SMALL = "model-00001-of-00001.safetensors", "config.json"


@cache
def big_bytes(size: int = 10 * RANGE_BYTES + 12_345, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass
class Bed:
    """The Hub, what it has, and where it goes."""

    hub: TestHub
    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = ""
    settings: NetworkSettings = field(default_factory=lambda: NetworkSettings(()))
    _lock: WeightsLock | None = None

    def publish(self, files: Mapping[str, bytes]) -> str:
        self.files = dict(files)
        self.commit = self.hub.add("org/tiny", files)
        self._lock = None
        return self.commit

    def spec(self, **changes: Any) -> WeightsSpec:
        about = "A set of weights that is only here for the tests."
        spec = {"name": "tiny", "repository": "org/tiny", "format": "safetensors", "quant": "bf16"}
        return WeightsSpec.model_validate({**spec, "about": about, **changes})

    def asker(self, token: str | None = TOKEN) -> Hub:
        return Hub(self.settings, endpoint=self.hub.url, token=token, first_wait_s=0.01)

    def lock(self) -> WeightsLock:
        if self._lock is None:
            files = self.asker().files("org/tiny", self.commit)
            self._lock = sealed_weights_lock(self.spec(), self.commit, files)
        return self._lock

    def pin(self, path: str = BIG) -> FilePin:
        return next(pin for pin in self.lock().files if pin.path == path)

    def place(self, *, hub_cache: bool = False) -> LockedFolder:
        return new_place(self.folder, self.lock(), hub_cache=hub_cache)

    def fetch(
        self,
        place: LockedFolder | None = None,
        *,
        pins: list[FilePin] | None = None,
        stall_s: float = 20.0,
        token: str | None = TOKEN,
        endpoint: str = "",
        neighbours: tuple[str, ...] = (),
        offline: bool = False,
        **options: Any,
    ) -> list[str]:
        """Fetch as the command does, with shorter waits between attempts; returns what was brought.

        A busy machine may be silent for a second: who plants a stall says how long it lasts."""
        place = place or self.place()
        client = NetClient(self.settings)
        routes = find_routes(
            client,
            place.lock,
            endpoint=endpoint or self.hub.url,
            token=token,
            neighbours=neighbours,
            offline=offline,
            stall_s=stall_s,
        )
        chosen = {"jobs": 4, "range_bytes": RANGE_BYTES, "first_wait_s": 0.01, **options}
        wanted = pins if pins is not None else place.lock.files
        brought = fetch_files(place, wanted, routes, client=client, options=Options(**chosen))
        return [pin.path for pin in brought]

    def require_right(self, place: LockedFolder | None = None) -> None:
        """Everything is there under its name, and nothing else is."""
        place = place or self.place()
        for path, data in self.files.items():
            assert (place.snapshot / path).read_bytes() == data, path
        assert not place.partial_folder.exists()

    def require_absent(self, path: str = BIG) -> None:
        """Nothing stands under the name, and nothing wrong is kept for later."""
        assert not (self.folder / path).exists()


@pytest.fixture
def hub() -> Iterator[TestHub]:
    with test_hub() as running:
        yield running


@pytest.fixture
def bed(hub: TestHub, tmp_path: Path) -> Bed:
    """A Hub with one small and one large file, and an empty folder."""
    made = Bed(hub, tmp_path / "weights")
    made.publish(
        {SMALL: b'{"model_type": "tiny"}', "code/modeling.py": b"one = 1\n", BIG: big_bytes()}
    )
    return made


@pytest.fixture
def quick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk whose clock ticks every 10 ms, so that a test need not wait for FAT's two seconds."""
    monkeypatch.setattr(receipt, "CLOCK_TICK_NS", 10_000_000)


@pytest.fixture(autouse=True)
def keep_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scrub` runs in our process here: what gave way once would give way to all tests after it."""
    monkeypatch.setattr("pipeline.app.weights.lower_priority", lambda: None)
