"""One interface to Docker and Podman, and which of them, and of namespaces, this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Literal, Protocol, TypeAlias

from pipeline.artifacts.containers import backend
from pipeline.artifacts.containers.arguments import ContainerArguments, EngineKind
from pipeline.artifacts.containers.docker import Docker
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.containers.podman import Podman
from pipeline.artifacts.containers.sandbox import Namespaces
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import DockerUnavailable, MissingTool, SandboxUnavailable, ToolUnavailable

Wanted: TypeAlias = EngineKind | Literal["auto"]


class ContainerEngine(Protocol):
    """What serving needs of a container engine."""

    @property
    def kind(self) -> EngineKind: ...

    def image(self, identity: str) -> ImageFacts | None:
        """An image by its id."""

    def load(self, store: Store, name: str, digest: str) -> object:
        """Loads an image of the store into the engine."""

    def create(self, arguments: ContainerArguments) -> str:
        """Makes a container without starting it; returns its id."""

    def start(self, identity: str) -> None: ...

    def containers(self) -> list[ContainerFacts]:
        """All containers of recipes, running or not."""

    def container(self, name: str) -> ContainerFacts | None:
        """A container by its name or id."""

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        """What a container printed, in pieces; to its end where it is followed."""

    def stop(self, identity: str, timeout_s: int) -> None:
        """Asks a container to end, and kills it after that time."""

    def remove(self, identity: str) -> None:
        """Removes a container, whatever its state."""

    def close(self) -> None: ...


def titles(engines: Iterable[ContainerEngine]) -> str:
    """The engines that were asked, as a person reads them."""
    return " and ".join(engine.kind.title() for engine in engines)


def find_engine(wanted: Wanted) -> ContainerEngine:
    """The named container engine, or the first that answers."""
    if wanted == "podman":
        try:
            return Podman()
        except MissingTool as error:
            with suppress(DockerUnavailable):
                Docker().close()
                error.hint = "Docker answers here: leave --runtime out, or install Podman."
            raise
    try:
        return Docker()
    except DockerUnavailable as error:
        if wanted == "docker" and Podman.answers():
            error.hint = f"Podman answers here: leave --runtime out. {error.hint}"
        if wanted == "auto" and not Podman.is_there():
            error.hint = "Start Docker, set DOCKER_HOST, or install Podman: either runs a recipe."
        if wanted == "docker" or not Podman.is_there():
            raise
    return Podman()


def find_engines(wanted: Wanted) -> list[ContainerEngine]:
    """Finds every engine that the user means and that answers: a server may run in either."""
    first = find_engine(wanted)
    if wanted == "auto" and first.kind == "docker" and Podman.answers():
        return [first, Podman()]
    return [first]


def find_backend(wanted: backend.Wanted) -> backend.SandboxBackend:
    """Tries the backends on this machine and returns the first that works."""
    backends: dict[backend.Kind, Callable[[], backend.SandboxBackend]] = {
        "namespaces": Namespaces,
        "docker": Docker,
        "podman": Podman.for_steps,
    }
    reasons = []
    for kind in backend.KINDS if wanted == "auto" else (wanted,):
        try:
            return backends[kind]()
        except ToolUnavailable as error:
            reasons.append(f"{kind}: {error}")
    raise SandboxUnavailable(f"no sandbox to compile in ({'; '.join(reasons)})")
