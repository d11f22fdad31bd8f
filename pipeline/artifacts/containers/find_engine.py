"""Which container engines this machine has."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, TypeAlias

from pipeline.artifacts.containers.container_engine import ContainerEngine, Docker, EngineKind
from pipeline.artifacts.containers.podman import Podman
from pipeline.core.errors import DockerUnavailable, MissingTool

Wanted: TypeAlias = EngineKind | Literal["auto"]


def find_engine(wanted: Wanted) -> ContainerEngine:
    """The named container engine, or the first that answers."""
    if wanted == "podman":
        try:
            return Podman()
        except MissingTool as error:
            with suppress(DockerUnavailable):
                Docker().close()
                error.hint = "Docker answers here: leave --engine out, or install Podman."
            raise
    try:
        return Docker()
    except DockerUnavailable as error:
        if wanted == "docker" and Podman.answers():
            error.hint = f"Podman answers here: leave --engine out. {error.hint}"
        if wanted == "auto" and not Podman.is_there():
            error.hint = "Start Docker, set DOCKER_HOST, or install Podman: either runs a recipe."
        if wanted == "docker" or not Podman.is_there():
            raise
    return Podman()


def find_engines(wanted: Wanted) -> list[ContainerEngine]:
    """Every engine that is meant and answers: what is served may run in either."""
    first = find_engine(wanted)
    if wanted == "auto" and first.kind == "docker" and Podman.answers():
        return [first, Podman()]
    return [first]
