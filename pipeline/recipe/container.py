"""A start as container engines take it: Docker, Podman, Compose and units all say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

from pipeline.errors import RecipeInvalid
from pipeline.model import Frozen
from pipeline.recipe.flags import Word
from pipeline.recipe.launch import Launch, Mount
from pipeline.recipe.model import Port, Variable

# The home of the images' user. Not `.cache` below it: images have no such folder, so that a volume
# there would belong to root.
HOME = "/home/engine"
# llama.cpp's programs hold machine code for the card, and compile nothing when they start.
_COMPILING = ("vllm", "sglang")
MOST_GPUS = 64  # of one machine, so that a typing error is seen as one
# Served to this machine only, unless the user asks for more: engines want no password.
LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104
# Where ipc is private: in the 64 MB that Docker gives a container, NCCL dies with SIGBUS. Memory is
# taken only as it is used, so there is no harm in plenty.
SHM_BYTES = 32 << 30


class Label(StrEnum):
    """Labels that find a container again, and say what it was started from."""

    RECIPE = "sm120.recipe"
    IMAGE = "sm120.image"
    DIGEST = "sm120.digest"
    ATTEMPT = "sm120.attempt"
    PORT = "sm120.port"
    MODEL = "sm120.model"
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
    capabilities: list[Word]

    def run_flags(self) -> list[str]:
        """The flags of `docker run` and `podman run`, which agree on these."""
        words = [f"--name={self.name}", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        words += [f"--cap-add={name}" for name in self.capabilities]
        words += [f"--device={name}" for name in self.devices]
        words += [f"--ipc={self.ipc}"] if self.ipc == "host" else []
        words += [f"--shm-size={self.shm_bytes}"] if self.shm_bytes else []
        words += ["--ulimit=memlock=-1:-1"] if self.memory_locked else []
        words += [f"--publish={self.address}:{self.port}:{self.port}"] if self.port else []
        words += [f"--entrypoint={self.entrypoint}"] if self.entrypoint else []
        for mount in self.mounts:
            words.append(f"--volume={mount.host}:{mount.inside}{':ro' if mount.read_only else ''}")
        words += [f"--volume={self.cache.name}:{self.cache.inside}"] if self.cache else []
        words += [f"--env={name}={value}" for name, value in self.environment.items()]
        return words + [f"--label={name}={value}" for name, value in self.labels.items()]


def container_arguments(
    launch: Launch,
    *,
    image: str,
    cards: Sequence[int] = (),
    labels: Mapping[str, str] | None = None,
    address: str = LOOPBACK,
) -> ContainerArguments:
    """A start in a container; `cards` are all of the machine's where none is named."""
    if launch.image is None:
        raise RecipeInvalid(
            f"{launch.recipe}: is for an engine without a container",
            f"`sm120 render {launch.recipe} --as shell` prints its command.",
        )
    name, own, has_cards = container_name(launch.recipe), launch.container, launch.cards > 0
    own_labels: dict[str, str] = {Label.RECIPE: launch.recipe, Label.IMAGE: launch.image}
    own_labels |= {Label.PORT: str(launch.port), Label.MODEL: launch.model}
    cache_name = name
    if launch.digest:
        own_labels[Label.DIGEST] = launch.digest
        # kernels of another image or recipe in a cache are a known cause of wrong output
        cache_name += f"-{launch.digest.removeprefix('sha256:')[:12]}"
    return ContainerArguments(
        name=name,
        image=image,
        arguments=launch.arguments,
        environment=launch.environment,
        labels={**own_labels, **(labels or {})},
        mounts=launch.mounts,
        cache=Cache(name=cache_name, inside=HOME) if launch.engine in _COMPILING else None,
        address=address,
        port=launch.port,
        ipc=own.ipc if has_cards else "private",
        shm_bytes=SHM_BYTES if has_cards and own.ipc == "private" else None,
        memory_locked=own.memory_locked and has_cards,
        devices=[f"nvidia.com/gpu={index}" for index in cards or ("all",)] if has_cards else [],
        capabilities=own.capabilities,
    )


def container_name(recipe: str) -> str:
    """One container for each recipe on a machine."""
    # Kubernetes and systemd take neither of the two, and a name is the same everywhere
    return "sm120-" + re.sub(r"[.+]", "-", recipe)
