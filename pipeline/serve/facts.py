"""What a container engine says of images and containers, and whether they are what was built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from pipeline.errors import AlreadyServed, ImageDiffers
from pipeline.model import Frozen
from pipeline.oci.record import ImageRecord
from pipeline.recipe.container import Label


class _Reported(Frozen):
    """A part of an answer; other fields are ignored."""

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

    @property
    def recipe(self) -> str:
        """The recipe by its label; empty for a container that `sm120 serve` did not start."""
        return self.labels.get(Label.RECIPE, "")

    @property
    def port(self) -> int | None:
        """The port by its label, which anybody may write."""
        text = self.labels.get(Label.PORT, "")
        is_number = text.isascii() and text.isdigit() and len(text) <= 5
        return int(text) if is_number and 0 < int(text) < 65536 else None


def own_name() -> str:
    """This user as the label of a container names one: user ids alone are 0 for many."""
    return f"uid {os.getuid()}, {Path.home()}"


def other_owner(facts: ContainerFacts) -> str:
    """The other user who started a container; empty where it is ours, or has no such label."""
    owner = facts.labels.get(Label.OWNER, "")
    return "" if owner == own_name() else "".join(c for c in owner if c.isprintable())[:200]


def require_own(facts: ContainerFacts) -> None:
    """Refuses to end or replace what another user serves."""
    if owner := other_owner(facts):
        recipe = facts.recipe or facts.name
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
    """Reads what `inspect` of Docker or Podman says of an image."""
    image = _Image.model_validate(answer)
    return ImageFacts(id=_digest(image.id), layers=image.root.layers or [])


def container_facts(answer: Mapping[str, Any]) -> ContainerFacts:
    """Reads what `inspect` of Docker or Podman says of a container."""
    container = _Container.model_validate(answer)
    return ContainerFacts(
        id=container.id,
        name=container.name.removeprefix("/"),
        image=_digest(container.image),
        labels=container.config.labels or {},
        **container.state.model_dump(),
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
    want = [layer.record.diff_id for layer in record.layers]
    if len(want) != len(image.layers):
        return f"it has {len(image.layers)} layers, built were {len(want)}"
    for number, (wanted, found) in enumerate(zip(want, image.layers, strict=True), start=1):
        if wanted != found:
            return f"layer {number} is {found}, built was {wanted}"
    return ""


def require_same(name: str, record: ImageRecord, image: ImageFacts | None) -> ImageFacts:
    """Refuses an image that is not the one that was built."""
    reason = difference(record, image)
    if image is None or reason:
        raise ImageDiffers(f"{name}: {reason}")
    return image
