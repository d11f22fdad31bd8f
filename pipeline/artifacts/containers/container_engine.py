"""One interface to Docker and Podman: images, containers, logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from pipeline.artifacts.containers import docker
from pipeline.artifacts.containers.arguments import ContainerArguments, Label
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import ContainerRefused, DockerUnavailable

if TYPE_CHECKING:
    from docker import DockerClient

EngineKind: TypeAlias = Literal["docker", "podman"]


class ContainerEngine(Protocol):
    """What serving needs of a container engine."""

    @property
    def kind(self) -> EngineKind: ...

    def image(self, identity: str) -> ImageFacts | None:
        """An image by its id."""

    def load(self, store: Store, name: str, digest: str) -> None:
        """Give it an image of the store."""

    def create(self, arguments: ContainerArguments) -> str:
        """A container that is not started yet; its id."""

    def start(self, identity: str) -> None: ...

    def containers(self) -> list[ContainerFacts]:
        """All containers of recipes, running or not."""

    def container(self, name: str) -> ContainerFacts | None:
        """A container by its name or id."""

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        """What a container printed, in pieces; to its end where it is followed."""

    def stop(self, identity: str, timeout_s: int) -> None:
        """Ask it to end; after that time it is killed."""

    def remove(self, identity: str) -> None:
        """Leave nothing of a container, whatever its state."""

    def close(self) -> None: ...


def titles(engines: Iterable[ContainerEngine]) -> str:
    """The engines that were asked, as a person reads them."""
    return " and ".join(engine.kind.title() for engine in engines)


class Docker:
    """Docker, through its SDK; `place` is a socket that leads to another host's."""

    kind: EngineKind = "docker"

    def __init__(self, place: Path | None = None) -> None:
        self._client: DockerClient = docker.connect(place)

    def image(self, identity: str) -> ImageFacts | None:
        # imported late: most commands need no Docker
        from docker.errors import ImageNotFound, NotFound

        with _explained("look for an image"):
            try:
                return ImageFacts.model_validate(self._client.images.get(identity).attrs)
            except (ImageNotFound, NotFound):
                return None

    def load(self, store: Store, name: str, digest: str) -> None:
        tag = docker.default_tag(name, digest)
        docker.load(store, name, digest, [tag], self._client)

    def create(self, arguments: ContainerArguments) -> str:
        with _explained("create the container", ContainerRefused):
            return str(self._client.containers.create(**sdk_arguments(arguments)).id)

    def start(self, identity: str) -> None:
        # a port that is taken or a card that is not there shows only now
        with _explained("start the container", ContainerRefused):
            self._client.api.start(identity)

    def containers(self) -> list[ContainerFacts]:
        with _explained("list containers"):
            rows = self._client.api.containers(all=True, filters={"label": Label.RECIPE})
            found = [self.container(str(row["Id"])) for row in rows]
            # one may have gone since it was listed
            return sorted((x for x in found if x is not None), key=lambda x: x.name)

    def container(self, name: str) -> ContainerFacts | None:
        from docker.errors import NotFound

        with _explained("look at a container"):
            try:
                return ContainerFacts.model_validate(self._client.api.inspect_container(name))
            except NotFound:
                return None

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        lines: Any = "all" if tail is None else tail
        with _explained("read the log"):
            yield from self._client.api.logs(identity, stream=True, follow=follow, tail=lines)

    def stop(self, identity: str, timeout_s: int) -> None:
        with _explained("stop the container"):
            self._client.api.stop(identity, timeout=timeout_s)

    def remove(self, identity: str) -> None:
        from docker.errors import NotFound

        with _explained("remove the container"), suppress(NotFound):
            # `v`: with its anonymous volumes, which would fill the disk
            self._client.api.remove_container(identity, force=True, v=True)

    def close(self) -> None:
        self._client.close()


def sdk_arguments(arguments: ContainerArguments) -> dict[str, Any]:
    """The same as `run_flags`, for Docker's SDK."""
    from docker.types import DeviceRequest, Mount, Ulimit

    # a mount of this kind fails where the folder is missing; Docker would make one for `volumes`
    mounts = [Mount(m.inside, m.host, type="bind", read_only=m.read_only) for m in arguments.mounts]
    if arguments.cache:
        mounts.append(Mount(arguments.cache.inside, arguments.cache.name, type="volume"))
    cards = [DeviceRequest(driver="cdi", device_ids=arguments.devices)] if arguments.devices else []
    port = arguments.port
    locked = [Ulimit(name="memlock", soft=-1, hard=-1)] if arguments.memory_locked else []
    return {
        "name": arguments.name,
        "image": arguments.image,
        "entrypoint": arguments.entrypoint,
        "command": arguments.arguments,
        "environment": arguments.environment,
        "labels": arguments.labels,
        "mounts": mounts,
        "ports": {f"{port}/tcp": (arguments.address, port)} if port else {},
        "ipc_mode": "host" if arguments.ipc == "host" else None,
        "shm_size": arguments.shm_bytes,
        "ulimits": locked,
        "device_requests": cards,
        # an engine needs no rights of root; a recipe names those that it wants
        "cap_drop": ["ALL"],
        "cap_add": arguments.capabilities,
        "security_opt": ["no-new-privileges"],
    }


@contextmanager
def _explained(
    what: str, kind: type[DockerUnavailable] | type[ContainerRefused] = DockerUnavailable
) -> Iterator[None]:
    from docker.errors import DockerException
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (DockerException, RequestException, HTTPError) as error:
        # the daemon explains itself; the SDK adds URLs and numbers to it
        reason = " ".join(str(getattr(error, "explanation", None) or error).split())[:400]
        raise kind(f"Docker could not {what}: {reason}") from error
