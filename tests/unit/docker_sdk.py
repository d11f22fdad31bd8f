"""Docker's SDK without a daemon: keeps what a container was asked to be."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import docker as sdk
import pytest

from pipeline.artifacts.containers.docker import Docker


class Asked:
    """In place of a client; its containers print nothing and end well."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.containers = self

    def ping(self) -> bool:
        return True

    def list(self, **_: object) -> list[Any]:
        return []

    def create(self, **wanted: Any) -> Any:
        self.wanted = wanted
        return SimpleNamespace(
            id="abc",
            attach=lambda **_: io.BytesIO(),
            start=lambda: None,
            remove=lambda force: None,
            wait=lambda: {"StatusCode": 0},
        )


def docker_on(client: Any, monkeypatch: pytest.MonkeyPatch) -> Docker:
    """Docker with this client in place of one that is connected."""
    monkeypatch.setattr(sdk, "from_env", lambda **_: client)
    return Docker()
