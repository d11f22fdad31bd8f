"""What a rendering needs beside the launch: the image's name, the cards, the host's settings."""

from __future__ import annotations

from typing import Annotated, Literal
from unicodedata import bidirectional, category

from pydantic import Field

from pipeline.artifacts.containers.arguments import ContainerArguments, Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import Frozen
from pipeline.serving.recipe.container import ANYWHERE, LOOPBACK, MOST_GPUS, container_arguments
from pipeline.serving.recipe.launch import Launch

# The Ansible role nccl writes both.
NCCL_SETTINGS = "/etc/sm120/nccl.env"
NCCL_LIBRARY = Mount(host="/usr/local/lib/sm120", inside="/usr/local/lib/sm120")
# Tables of units, shells and environments end a value at a line's end.
_LINE_ENDS = ("Cc", "Zl", "Zp")  # of unicodedata, with all control characters
# Marks that turn the direction of a text: what a person reads is then not what runs.
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")

Gpu = Annotated[int, Field(ge=0, lt=MOST_GPUS)]


class Target(Frozen):
    """Where a launch is to run."""

    image: str = ""  # as the container engine finds it: by digest, or a local name
    gpus: list[Gpu] | None = None  # none: all of them
    nccl: Literal["settings", "patched"] | None = None  # of the host, by the role nccl
    runner: Literal["docker", "podman"] = "docker"  # of a systemd unit
    lan: bool = False  # other machines may connect, too
    cdi: bool = True  # Docker knows the cards by their CDI names
    detached: bool = False  # a command starts the container and ends
    claim: str | None = None  # a PersistentVolumeClaim with the weights

    @property
    def is_local(self) -> bool:
        """Whether the image was loaded here: no registry may answer for its name."""
        return "@" not in self.image


def require_plain(launch: Launch, target: Target) -> None:
    """Refuses what some format cannot hold: line ends, control characters, what is no text."""
    texts = [target.image, launch.model, *launch.arguments]
    texts += [*launch.environment, *launch.environment.values(), *launch.container.capabilities]
    for value in (*texts, *(mount.host for mount in launch.mounts)):
        if any(category(char) in _LINE_ENDS or bidirectional(char) in _TURNS for char in value):
            raise RecipeInvalid(
                f"{launch.recipe}: {value!r} holds a line end or another control character",
                "Give the value on one line, without control characters.",
            )
        # systemd reads neither bytes that are no UTF-8 nor numbers that Unicode gives to nothing
        if any(
            ord(char) & 0xFFFE == 0xFFFE or "\ufdd0" <= char <= "\ufdef" or category(char) == "Cs"
            for char in value
        ):
            raise RecipeInvalid(
                f"{launch.recipe}: {value!r} holds bytes that are no text",
                "Name the folder by another path, such as a link to it, and write values as UTF-8.",
            )


def require_count(launch: Launch, gpus: list[Gpu]) -> None:
    """Refuses to choose more or fewer cards than the recipe is written for."""
    if len(set(gpus)) != len(gpus) or len(gpus) != launch.cards:
        raise RecipeInvalid(
            f"{launch.recipe}: is for {launch.cards} GPUs, and --gpus names {len(set(gpus))}",
            f"Name {launch.cards} different GPUs, or leave --gpus out.",
        )


def contained(launch: Launch, target: Target) -> ContainerArguments:
    """The container that `sm120 serve` would start, with what its document has otherwise."""
    if launch.cards and target.gpus is not None:
        require_count(launch, target.gpus)
    documented = launch.container.as_documented
    address = ANYWHERE if target.lan or documented else LOOPBACK
    cards = target.gpus or ()
    found = container_arguments(launch, image=target.image, cards=cards, address=address)
    mounts = [*found.mounts, *([NCCL_LIBRARY] if target.nccl == "patched" else [])]
    for mount in mounts:
        # Docker and Podman split at every colon, and quadlets have no escape for it
        if ":" in mount.host or not mount.host.startswith("/"):
            raise RecipeInvalid(
                f"{mount.host}: a mounted folder has an absolute path without a colon",
                "Name the folder by another path, such as a link to it.",
            )
    shm_bytes = None if documented else found.shm_bytes
    return found.model_copy(update={"mounts": mounts, "shm_bytes": shm_bytes})


def published(container: ContainerArguments) -> str:
    """The port of the host and of the container, for this machine alone or for all."""
    ports = f"{container.port}:{container.port}"
    return ports if container.address == ANYWHERE else f"{container.address}:{ports}"
