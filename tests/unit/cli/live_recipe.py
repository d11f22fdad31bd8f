"""A recipe of a built image whose containers are a model server of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from pipeline.app import serve as job_module
from pipeline.app import serve as on_host_module
from pipeline.artifacts.containers.arguments import ContainerArguments
from pipeline.artifacts.containers.facts import ImageFacts
from pipeline.artifacts.store.store import read_image_record
from pipeline.serving.serve import start as start_module
from tests.testbed.model_server import ModelServer
from tests.testbed.ports import unused_port
from tests.unit.serve.fake_engine import FakeEngine
from tests.unit.support import AMD64, Command, Ended, build_tiny


class LiveServer:
    """A model server on a port of its own, which can be ended and started again."""

    def __init__(self) -> None:
        self.model = ModelServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._running: asyncio.Server | None = None
        self.port = unused_port()

    def open(self) -> None:
        async def start() -> asyncio.Server:
            return await asyncio.start_server(
                self.model.handle, "127.0.0.1", self.port, backlog=512
            )

        self._running = asyncio.run_coroutine_threadsafe(start(), self._loop).result(30)

    def close(self) -> None:
        if self._running is not None:
            self._loop.call_soon_threadsafe(self._running.close)
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(30)
        self._running = None

    def end(self) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@dataclass
class LiveEngine(FakeEngine):
    """Containers whose engine is the model server of the test."""

    live: LiveServer = field(default_factory=LiveServer)

    @property
    def model(self) -> ModelServer:
        return self.live.model

    def create(self, arguments: ContainerArguments) -> str:
        self.model.is_drafting = "--speculative-config" in arguments.arguments
        self.model.restarts = -1
        comes_up = self.model.fault.starts_drafting or not self.model.is_drafting
        self.ends_with = None if comes_up else 1
        return super().create(arguments)

    def start(self, identity: str) -> None:
        self.model.restarts += 1
        if self.ends_with is None:
            self.live.open()

    def stop(self, identity: str, timeout_s: int) -> None:
        super().stop(identity, timeout_s)
        self.live.close()

    def remove(self, identity: str) -> None:
        super().remove(identity)
        self.live.close()


class LiveRecipe:
    """A built image, a recipe of it, and a container engine."""

    def __init__(self, sm120: Command, engine: LiveEngine, weights: Path) -> None:
        self.sm120, self.engine, self.weights = sm120, engine, weights
        self.store = Path(sm120("store", "show", "--json").json["root"])
        record = read_image_record(next(self.store.glob("images/tiny/*/image.json")))
        self.digest = record.digest
        layers = [layer.record.diff_id for layer in record.layers]
        engine.images = {record.config: ImageFacts(id=record.config, layers=layers)}
        engine.image_of_container = record.config

    def recipe(self, **changes: Any) -> None:
        body = {
            "name": "brainy",
            "summary": "a model that knows its sums",
            "backing": "proved",
            "sources": {"ours": {"kind": "ours", "title": "this project", "why": "a test"}},
            "image": "tiny",
            "engine": "vllm",
            "model": {"repository": "org/brain", "name": "brain-1"},
            "hardware": {"cards": 0},
            "port": self.engine.live.port,
            "smoke": {"streams": [1, 2]},
            **changes,
        }
        folder = self.sm120.cwd / "recipes"
        folder.mkdir(exist_ok=True)
        (folder / "brainy.yaml").write_text(yaml.safe_dump(body))

    def serve(self, *more: str) -> Ended:
        skipped = ("--skip-preflight", "weights", "--skip-preflight", "flags")
        return self.sm120("serve", "brainy", "--weights", self.weights, *skipped, *more)

    def attempts(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.sm120("recipe", "attempts", "--json").json
        return rows


Kind = TypeVar("Kind", bound=LiveRecipe)


@contextmanager
def live_recipe(
    sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Kind]
) -> Iterator[Kind]:
    """The recipe `brainy`, which a test serves as a user does."""
    assert build_tiny(sm120, "--platform", AMD64, "--accept").code == 0
    engine = LiveEngine()
    monkeypatch.setattr(on_host_module, "find_engine", lambda wanted: engine)
    monkeypatch.setattr(on_host_module, "find_engines", lambda wanted: [engine])
    monkeypatch.setattr(job_module, "pick_platform", lambda spec, chosen: AMD64)
    monkeypatch.setattr("pipeline.app.images.pick_platform", lambda spec, chosen: AMD64)
    monkeypatch.setattr(start_module, "_POLL_S", 0.01)
    monkeypatch.setattr(start_module, "_AFTERMATH_S", 0.1)
    weights = tmp_path / "weights"
    weights.mkdir()
    made = kind(sm120, engine, weights)
    made.recipe()
    try:
        yield made
    finally:
        engine.live.end()
