"""What a container engine says of images and containers, and whether they are what was built."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from pipeline.errors import AlreadyServed, ImageDiffers
from pipeline.model import Frozen
from pipeline.oci.record import ImageRecord
from pipeline.recipe.container import OWNER_LABEL, RECIPE_LABEL


class _Reported(Frozen):
    """A part of an answer: what is not asked for is passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ImageFacts(Frozen):
    """An image as a container engine knows it."""

    id: str
    layers: list[str]  # diffIDs, from the bottom


class ContainerFacts(Frozen):
    """A container as its engine knows it."""

    id: str
    name: str
    image: str  # the id of its image
    labels: dict[str, str]
    status: str
    running: bool
    exit_code: int
    out_of_memory: bool
    started_at: str


def own_name() -> str:
    """This user as the label of a container names one: user ids alone are 0 for many."""
    return f"uid {os.getuid()}, {Path.home()}"


def other_owner(facts: ContainerFacts) -> str:
    """The other user who started a container; empty where it is ours, or nobody's by its label."""
    owner = facts.labels.get(OWNER_LABEL, "")
    return "" if owner == own_name() else "".join(c for c in owner if c.isprintable())[:200]


def require_own(facts: ContainerFacts) -> None:
    """Refuse to end or replace what another user serves."""
    if owner := other_owner(facts):
        recipe = facts.labels.get(RECIPE_LABEL, facts.name)
        raise AlreadyServed(
            f"{recipe}: its container {facts.name} is another user's ({owner})",
            f"Nothing was done to it. Ask them to run `sm120 recipe stop {recipe}`.",
        )


class _RootFs(_Reported):
    layers: list[str] | None = Field(default=None, alias="Layers")


class _Image(_Reported):
    id: str = Field(alias="Id")
    root: _RootFs = Field(alias="RootFS")


class _State(_Reported):
    status: str = Field(alias="Status")
    running: bool = Field(alias="Running")
    exit_code: int = Field(alias="ExitCode")
    out_of_memory: bool = Field(default=False, alias="OOMKilled")
    started_at: str = Field(default="", alias="StartedAt")


class _Config(_Reported):
    labels: dict[str, str] | None = Field(default=None, alias="Labels")


class _Container(_Reported):
    id: str = Field(alias="Id")
    name: str = Field(alias="Name")
    image: str = Field(alias="Image")
    state: _State = Field(alias="State")
    config: _Config = Field(alias="Config")


def image_facts(answer: Mapping[str, Any]) -> ImageFacts:
    """From `inspect` of Docker or Podman."""
    image = _Image.model_validate(answer)
    return ImageFacts(id=_digest(image.id), layers=image.root.layers or [])


def container_facts(answer: Mapping[str, Any]) -> ContainerFacts:
    """From `inspect` of Docker or Podman."""
    container = _Container.model_validate(answer)
    state = container.state
    return ContainerFacts(
        id=container.id,
        name=container.name.removeprefix("/"),
        image=_digest(container.image),
        labels=container.config.labels or {},
        status=state.status,
        running=state.running,
        exit_code=state.exit_code,
        out_of_memory=state.out_of_memory,
        started_at=state.started_at,
    )


def _digest(text: str) -> str:
    # Podman leaves the algorithm out
    return text if ":" in text else f"sha256:{text}"


def difference(record: ImageRecord, image: ImageFacts | None) -> str:
    """In what an engine's image is not the one of the store; empty where it is the same.

    Docker's own store names an image by its config, containerd's by its manifest. Either commits
    to the layers, but an engine could have mixed them up: they are compared, too.
    """
    if image is None:
        return "its image is gone"
    if image.id not in (record.config, record.digest):
        return f"its image is {image.id}, built was {record.config}"
    return _layer_difference([x.record.diff_id for x in record.layers], image.layers)


def _layer_difference(want: Sequence[str], got: Sequence[str]) -> str:
    if len(want) != len(got):
        return f"it has {len(got)} layers, built were {len(want)}"
    for number, (wanted, found) in enumerate(zip(want, got, strict=True), start=1):
        if wanted != found:
            return f"layer {number} is {found}, built was {wanted}"
    return ""


def require_same(name: str, record: ImageRecord, image: ImageFacts | None) -> None:
    """Refuse what is not what was built."""
    if reason := difference(record, image):
        raise ImageDiffers(f"{name}: {reason}")
