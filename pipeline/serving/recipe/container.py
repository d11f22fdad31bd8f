"""A start as container engines take it: Docker, Podman, Compose and units all say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pipeline.artifacts.containers.arguments import Cache, ContainerArguments, Label
from pipeline.core.errors import RecipeInvalid
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
