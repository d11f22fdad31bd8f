"""A start as container engines take it: Docker, Podman, Compose and units all say the same.

A rendering needs more than the launch: the image's name, the cards, the host's settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal
from unicodedata import bidirectional, category

from pydantic import Field

from pipeline.artifacts.containers.arguments import Cache, ContainerArguments, Label, Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import Frozen
from pipeline.serving.recipe.launch import Launch

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
# The Ansible role nccl writes both.
NCCL_SETTINGS = "/etc/sm120/nccl.env"
NCCL_LIBRARY = Mount(host="/usr/local/lib/sm120", inside="/usr/local/lib/sm120")
# InfiniBand and RoCE: a process reaches the adapter through these, with memory that may be locked.
RDMA_DEVICES = "/dev/infiniband"
# Tables of units, shells and environments end a value at a line's end.
_LINE_ENDS = ("Cc", "Zl", "Zp")  # of unicodedata, with all control characters
# Marks that turn the direction of a text: what a person reads is then not what runs.
_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")

Gpu = Annotated[int, Field(ge=0, lt=MOST_GPUS)]


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
    words, is_shared = launch.arguments, launch.nodes > 1
    if is_shared and "--host" not in words and not (launch.rank and launch.engine == "vllm"):
        # the images' entrypoints listen everywhere, and a host's own network publishes all of it
        words = [*words, "--host", address]
    own_labels: dict[str, str] = {Label.RECIPE: launch.recipe, Label.IMAGE: launch.image}
    own_labels |= {Label.PORT: str(launch.port), Label.MODEL: launch.model}
    own_labels |= {Label.RANK: f"{launch.rank}/{launch.nodes}"} if is_shared else {}
    cache_name = name
    if launch.digest:
        own_labels[Label.DIGEST] = launch.digest
        # kernels of another image or recipe in a cache are a known cause of wrong output
        cache_name += f"-{launch.digest.removeprefix('sha256:')[:12]}"
    return ContainerArguments(
        name=name,
        image=image,
        arguments=words,
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
        host_network=is_shared,
        capabilities=own.capabilities,
    )


def container_name(recipe: str) -> str:
    """One container for each recipe on a machine."""
    # Kubernetes and systemd take neither of the two, and a name is the same everywhere
    return "sm120-" + re.sub(r"[.+]", "-", recipe)


class UnitSettings(Frozen):
    """What a unit that stays on a host has beyond one that is only rendered."""

    log_mib: Annotated[int, Field(ge=1, le=100_000)] = 50  # of one file, for Docker
    log_files: Annotated[int, Field(ge=1, le=1000)] = 5
    # a second address of the host at which Prometheus reads /metrics, such as 10.0.0.5:9400
    metrics: Annotated[str, Field(pattern=r"^$|^[0-9.]+:[0-9]{1,5}$")] = ""


class LaunchTarget(Frozen):
    """Where a launch is to run."""

    image: str = ""  # as the container engine finds it: by digest, or a local name
    gpus: list[Gpu] | None = None  # none: all of them
    nccl: Literal["settings", "patched"] | None = None  # of the host, by the role nccl
    runner: Literal["docker", "podman", "pyxis"] = "docker"  # of a systemd unit or a Slurm job
    rdma: bool = False  # the container gets the host's RDMA devices
    lan: bool = False  # other machines may connect, too
    cdi: bool = True  # Docker knows the cards by their CDI names
    detached: bool = False  # a command starts the container and ends
    claim: str | None = None  # a PersistentVolumeClaim with the weights
    weights_image: str | None = None  # an image with the weights, by digest
    deployed: UnitSettings | None = None  # of a unit that `sm120 host deploy` writes

    @property
    def is_local(self) -> bool:
        """Whether the image was loaded here: no registry may answer for its name."""
        return "@" not in self.image


def require_plain_text(launch: Launch, target: LaunchTarget) -> None:
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


def contained(launch: Launch, target: LaunchTarget) -> ContainerArguments:
    """The container that `sm120 serve` would start, with its document's differences."""
    if launch.cards and target.gpus is not None:
        require_count(launch, target.gpus)
    if target.rdma and launch.environment.get("NCCL_IB_DISABLE") == "1":
        raise RecipeInvalid(
            f"{launch.recipe}: sets NCCL_IB_DISABLE=1, so that NCCL uses no RDMA device",
            "Leave --rdma out, or copy the recipe without that variable.",
        )
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
