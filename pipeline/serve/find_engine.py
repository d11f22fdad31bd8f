"""Which container engine this machine has."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pipeline.errors import DockerUnavailable
from pipeline.serve.container_engine import ContainerEngine, Docker, EngineKind
from pipeline.serve.podman import Podman

Wanted: TypeAlias = EngineKind | Literal["auto"]


def find_engine(wanted: Wanted) -> ContainerEngine:
    """The named container engine, or the first that answers."""
    if wanted == "podman":
        return Podman()
    try:
        return Docker()
    except DockerUnavailable:
        if wanted == "docker" or not Podman.is_there():
            raise
    return Podman()
