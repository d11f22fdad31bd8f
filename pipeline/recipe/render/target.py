"""What a rendering needs beside the launch: the image's name, the cards, the host's settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from unicodedata import bidirectional, category

from pydantic import Field

from pipeline.errors import RecipeInvalid
from pipeline.model import Frozen
from pipeline.recipe.container import LOOPBACK, MOST_GPUS, card_devices, shm_of
from pipeline.recipe.launch import Launch, Mount

# The user of the images. Kubernetes can tell only of a number that it is not root.
USER_ID = 1000
# Written by the Ansible role nccl.
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
    gpus: list[Gpu] | None = None  # all, where nobody chooses
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

    def image_for(self, runner: str) -> str:
        """The image as Docker or Podman calls it."""
        # `podman load` puts this before a name without a registry
        return f"localhost/{self.image}" if self.is_local and runner == "podman" else self.image


def require_contained(launch: Launch) -> None:
    """Refuse a recipe without an image where a container is to run."""
    if launch.image is None:
        raise RecipeInvalid(
            f"{launch.recipe}: has no image, it is for an engine of this machine",
            "Render it with --as shell, or choose a recipe with an image.",
        )


def require_plain(launch: Launch, target: Target) -> None:
    """Refuse what some format cannot hold: line ends, control characters, what is no text."""
    for value in _texts(launch, target):
        if any(category(char) in _LINE_ENDS or bidirectional(char) in _TURNS for char in value):
            raise RecipeInvalid(
                f"{launch.recipe}: {value!r} holds a line end or another control character",
                "Give the value on one line, without control characters.",
            )
        if any(map(_is_no_character, value)):
            raise RecipeInvalid(
                f"{launch.recipe}: {value!r} holds bytes that are no text",
                "Name the folder by another path, such as a link to it, and write values as UTF-8.",
            )


def _is_no_character(char: str) -> bool:
    """A byte that is no UTF-8, or a number that Unicode gives to nothing: systemd reads neither."""
    is_none = ord(char) & 0xFFFE == 0xFFFE or "\ufdd0" <= char <= "\ufdef"
    return is_none or category(char) == "Cs"


def _texts(launch: Launch, target: Target) -> Iterator[str]:
    yield from (target.image, launch.model)
    yield from launch.arguments
    yield from (*launch.environment, *launch.environment.values())
    yield from launch.container.capabilities
    for mount in launch.mounts:
        yield mount.host


def devices(launch: Launch, target: Target) -> list[str]:
    """The cards by their CDI names; none where the recipe needs none."""
    if not launch.cards:
        return []
    if target.gpus is not None:
        require_count(launch, target.gpus)
    return card_devices(launch.cards, target.gpus or ())


def require_count(launch: Launch, gpus: list[Gpu]) -> None:
    """Refuse to choose more or fewer cards than the recipe is written for."""
    if len(set(gpus)) != len(gpus) or len(gpus) != launch.cards:
        raise RecipeInvalid(
            f"{launch.recipe}: is for {launch.cards} GPUs, and --gpus names {len(set(gpus))}",
            f"Name {launch.cards} different GPUs, or leave --gpus out.",
        )


def published(launch: Launch, target: Target) -> str:
    """The port of the host and of the container: for this machine alone, as `serve` has it."""
    ports = f"{launch.port}:{launch.port}"
    is_open = target.lan or launch.container.as_documented
    return ports if is_open else f"{LOOPBACK}:{ports}"


def drops_rights(launch: Launch) -> bool:
    """Whether the container has no capability but those of the recipe, as `serve` has it."""
    return not launch.container.as_documented


def mounts(launch: Launch, target: Target) -> list[Mount]:
    """The folders of the host that a container sees."""
    found = [*launch.mounts, *([NCCL_LIBRARY] if target.nccl == "patched" else [])]
    for mount in found:
        # Docker and Podman split at every colon, and quadlets have no escape for it
        if ":" in mount.host or not mount.host.startswith("/"):
            raise RecipeInvalid(
                f"{mount.host}: a mounted folder has an absolute path without a colon",
                "Name the folder by another path, such as a link to it.",
            )
    return found


def shares_memory(launch: Launch) -> bool:
    """Whether the container shares the host's memory segments, as NCCL wants it."""
    return launch.cards > 0 and launch.container.ipc == "host"


def shm_bytes(launch: Launch) -> int | None:
    """The size of a container's own shared memory, as `serve` has it."""
    return None if launch.container.as_documented else shm_of(launch)


def locks_memory(launch: Launch) -> bool:
    """Whether the engine may lock as much memory as it likes, for transfers to cards."""
    return launch.cards > 0 and launch.container.memory_locked
