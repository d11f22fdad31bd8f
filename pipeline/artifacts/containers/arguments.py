"""What a container engine is asked to start; Docker, Podman, Compose and units take the same."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

from pipeline.core.model import Frozen, Port, Variable, Word

EngineKind: TypeAlias = Literal["docker", "podman"]


class Mount(Frozen):
    """A folder of the host that the engine sees."""

    host: str
    inside: str
    read_only: bool = True


class Label(StrEnum):
    """Labels that find a container again, and say what it was started from."""

    RECIPE = "sm120.recipe"
    IMAGE = "sm120.image"
    DIGEST = "sm120.digest"
    ATTEMPT = "sm120.attempt"
    PORT = "sm120.port"
    MODEL = "sm120.model"
    RANK = "sm120.rank"  # and the number of nodes, such as 1/2
    OWNER = "sm120.owner"  # several users may share one Docker


class Cache(Frozen):
    """A volume with what an engine compiles at run time."""

    name: Word
    inside: str


class ContainerArguments(Frozen):
    """Everything that a container engine needs to know."""

    name: Word
    image: str  # a reference that cannot move, or an image id
    entrypoint: str | None = None  # a program in place of the image's own
    arguments: list[str]
    environment: dict[Variable, str]
    labels: dict[str, str]
    mounts: list[Mount]
    cache: Cache | None
    address: str
    port: Port | None  # none: nothing in it listens
    ipc: Literal["host", "private"]
    shm_bytes: int | None
    memory_locked: bool
    devices: list[str]  # cards by their CDI names
    # the host's own network, where ranks on several machines choose their ports themselves
    host_network: bool = False
    capabilities: list[Word]

    def run_flags(self) -> list[str]:
        """The flags of `docker run` and `podman run`, which agree on these."""
        words = [f"--name={self.name}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        words += [f"--cap-add={name}" for name in self.capabilities]
        words += [f"--device={name}" for name in self.devices]
        words += [f"--ipc={self.ipc}"] if self.ipc == "host" else []
        words += [f"--shm-size={self.shm_bytes}"] if self.shm_bytes else []
        words += ["--ulimit=memlock=-1:-1"] if self.memory_locked else []
        if self.host_network:
            words.append("--network=host")
        elif self.port:
            words.append(f"--publish={self.address}:{self.port}:{self.port}")
        words += [f"--entrypoint={self.entrypoint}"] if self.entrypoint else []
        for mount in self.mounts:
            words.append(f"--volume={mount.host}:{mount.inside}{':ro' if mount.read_only else ''}")
        words += [f"--volume={self.cache.name}:{self.cache.inside}"] if self.cache else []
        words += [f"--env={name}={value}" for name, value in self.environment.items()]
        return words + [f"--label={name}={value}" for name, value in self.labels.items()]
