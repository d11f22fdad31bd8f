"""A container engine whose containers are decided by the test, and a server that one may have."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pipeline.artifacts.containers.arguments import ContainerArguments, EngineKind
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.oci.document import Descriptor
from pipeline.artifacts.oci.record import ImageRecord, LayerRecord, TitledLayer
from pipeline.artifacts.store.store import Store


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def _layer(letter: str) -> TitledLayer:
    record = LayerRecord(digest=digest("f"), diff_id=digest(letter), size_bytes=1, unpacked_bytes=1)
    return TitledLayer(title=letter, record=record)


RECORD = ImageRecord(
    key=digest("0"),
    code=digest("0"),
    config=digest("c"),
    descriptor=Descriptor(
        media_type="application/vnd.oci.image.manifest.v1+json", digest=digest("d"), size_bytes=1
    ),
    layers=(_layer("1"), _layer("2")),
)
BUILT = ImageFacts(id=RECORD.config, layers=[digest("1"), digest("2")])


@dataclass
class FakeEngine:
    """Images and containers in memory."""

    images: dict[str, ImageFacts] = field(default_factory=lambda: {BUILT.id: BUILT})
    known: dict[str, ContainerFacts] = field(default_factory=dict)
    log: list[bytes] = field(default_factory=list)
    ends_with: int | None = None  # none: it goes on
    out_of_memory: bool = False
    image_of_container: str = BUILT.id
    loads: list[str] = field(default_factory=list)
    loadable: ImageFacts | None = BUILT
    created: list[ContainerArguments] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)
    kind: EngineKind = "docker"

    def image(self, identity: str) -> ImageFacts | None:
        return self.images.get(identity)

    def load(self, store: Store, name: str, digest: str) -> None:
        self.loads.append(digest)
        if self.loadable is not None:
            self.images[self.loadable.id] = self.loadable

    def create(self, arguments: ContainerArguments) -> str:
        self.created.append(arguments)
        self.known[arguments.name] = self._facts(arguments.name, arguments.labels)
        return arguments.name

    def _facts(self, name: str, labels: dict[str, str]) -> ContainerFacts:
        return ContainerFacts(
            id=name,
            name=name,
            image=self.image_of_container,
            labels=labels,
            status="running" if self.ends_with is None else "exited",
            running=self.ends_with is None,
            exit_code=self.ends_with or 0,
            out_of_memory=self.out_of_memory,
            started_at="2026-11-16T07:15:35Z",
        )

    def put(self, name: str, labels: dict[str, str]) -> None:
        """A container that is there already."""
        self.known[name] = self._facts(name, labels)

    def start(self, identity: str) -> None:
        return

    def containers(self) -> list[ContainerFacts]:
        return list(self.known.values())

    def container(self, name: str) -> ContainerFacts | None:
        return self.known.get(name)

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        yield from self.log

    def stop(self, identity: str, timeout_s: int) -> None:
        self.stopped.append((identity, timeout_s))

    def remove(self, identity: str) -> None:
        self.known.pop(identity, None)

    def close(self) -> None:
        return


@contextmanager
def answering(models: list[str], health: int = 200) -> Iterator[int]:
    """A server on loopback with these models; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body: Any = {"data": [{"id": name, "created": 10**20} for name in models]}
            self.send_response(health if self.path == "/health" else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
