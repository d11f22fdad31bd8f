"""What a container engine says of images and containers, and whether they are what was built."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, AliasPath, BeforeValidator, ConfigDict, Field

from pipeline.artifacts.containers.arguments import Label
from pipeline.artifacts.oci.record import ImageRecord
from pipeline.core.errors import AlreadyServed, ImageDiffers
from pipeline.core.model import Frozen

# Podman leaves the algorithm out
ImageId = Annotated[str, AfterValidator(lambda text: text if ":" in text else f"sha256:{text}")]
Layers = Annotated[list[str], BeforeValidator(lambda value: value or [])]
Labels = Annotated[dict[str, str], BeforeValidator(lambda value: value or {})]
ContainerName = Annotated[str, AfterValidator(lambda name: name.removeprefix("/"))]


class _Inspected(Frozen):
    """Fields by their path in what `inspect` of Docker and Podman prints."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class ImageFacts(_Inspected):
    """An image as a container engine knows it."""

    id: ImageId = Field(validation_alias="Id")
    # diffIDs, from the bottom
    layers: Layers = Field(default=[], validation_alias=AliasPath("RootFS", "Layers"))


class ContainerFacts(_Inspected):
    """A container as its engine knows it."""

    id: str = Field(validation_alias="Id")
    name: ContainerName = Field(validation_alias="Name")
    image: ImageId = Field(validation_alias="Image")
    labels: Labels = Field(default={}, validation_alias=AliasPath("Config", "Labels"))
    status: str = Field(validation_alias=AliasPath("State", "Status"))
    running: bool = Field(validation_alias=AliasPath("State", "Running"))
    exit_code: int = Field(validation_alias=AliasPath("State", "ExitCode"))
    out_of_memory: bool = Field(default=False, validation_alias=AliasPath("State", "OOMKilled"))
    started_at: str = Field(default="", validation_alias=AliasPath("State", "StartedAt"))
    pid: int = Field(default=0, validation_alias=AliasPath("State", "Pid"))  # 0: it does not run

    @property
    def recipe(self) -> str:
        """The recipe by its label; empty for a container that `sm120 serve` did not start."""
        return self.labels.get(Label.RECIPE, "")

    @property
    def port(self) -> int | None:
        """The port by its label; any user may write labels."""
        text = self.labels.get(Label.PORT, "")
        is_number = text.isascii() and text.isdigit() and len(text) <= 5
        return int(text) if is_number and 0 < int(text) < 65536 else None


def own_user() -> str:
    """This user as the label of a container names one: user ids alone are 0 for many."""
    return f"uid {os.getuid()}, {Path.home()}"


def other_owner(facts: ContainerFacts) -> str:
    """The other user who started a container; empty where it is ours, or has no such label."""
    owner = facts.labels.get(Label.OWNER, "")
    return "" if owner == own_user() else "".join(c for c in owner if c.isprintable())[:200]


def require_own(facts: ContainerFacts) -> None:
    """Refuses to end or replace what another user serves."""
    if owner := other_owner(facts):
        recipe = facts.recipe or facts.name
        raise AlreadyServed(
            f"{recipe}: its container {facts.name} is another user's ({owner})",
            f"Nothing was done to it. Ask them to run `sm120 recipe stop {recipe}`.",
        )


def difference(record: ImageRecord, image: ImageFacts | None) -> str:
    """How an engine's image differs from the store's; empty where it is the same.

    Docker's own store names an image by its config, containerd's by its manifest. Either commits
    to the layers, but an engine could have mixed them up, so this compares them, too.
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
