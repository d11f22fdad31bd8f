"""The config of a foreign image: the fields that our images inherit, read strictly.

Unused fields may be there and are ignored; the fields that are used must be sound.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from pipeline.artifacts.oci.document import read_document_json
from pipeline.core.errors import BaseUnusable
from pipeline.core.model import Digest, sha256_of
from pipeline.core.net.address import without_controls

MOST_CONFIG_BYTES = 4 << 20  # as large as a manifest may be
# Of variables, layers or steps; real images have some dozens of each.
_MOST = 10_000
_LONGEST = 1 << 17  # of a variable: what Linux itself allows


def _no_nul(text: str) -> str:
    # the kernel would end the text there
    if "\0" in text:
        raise ValueError("contains a NUL")
    return text


def _is_variable(text: str) -> str:
    name, sign, _ = text.partition("=")
    if not sign or not name or not name.isprintable():
        raise ValueError("is not NAME=VALUE")
    return text


def _is_path(text: str) -> str:
    # container engines resolve `..` differently
    if not text.startswith("/") or ".." in text.split("/") or not text.isprintable():
        raise ValueError("is not an absolute path")
    return text


_Text = Annotated[str, StringConstraints(max_length=_LONGEST), AfterValidator(_no_nul)]
_Variable = Annotated[_Text, AfterValidator(_is_variable)]
_Path = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_is_path)]
# Empty where a Dockerfile has no WORKDIR.
_Workdir = Annotated[
    str, StringConstraints(max_length=4096), AfterValidator(lambda text: text and _is_path(text))
]
_Port = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp|sctp))?$")]
_User = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?$", max_length=200)
]
_Signal = Annotated[str, StringConstraints(pattern=r"^([A-Z0-9+-]{1,20})?$")]
_Bounded = Field(max_length=_MOST)
_Words = Annotated[list[_Text], _Bounded]


class _Part(BaseModel):
    """Closed for what is used, open for what is not."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Past(_Part):
    """One step of an image's history."""

    created: _Text | None = None
    author: _Text | None = None
    created_by: _Text | None = None
    comment: _Text | None = None
    empty_layer: bool | None = None


class RunSettings(_Part):
    """How an image runs."""

    env: Annotated[list[_Variable], _Bounded] | None = Field(None, alias="Env")
    user: _User | None = Field(None, alias="User")
    workdir: _Workdir | None = Field(None, alias="WorkingDir")
    entrypoint: _Words | None = Field(None, alias="Entrypoint")
    command: _Words | None = Field(None, alias="Cmd")
    ports: Annotated[dict[_Port, Any], _Bounded] | None = Field(None, alias="ExposedPorts")
    volumes: Annotated[dict[_Path, Any], _Bounded] | None = Field(None, alias="Volumes")
    stop_signal: _Signal | None = Field(None, alias="StopSignal")


class _RootFs(_Part):
    type: Annotated[str, StringConstraints(pattern="^layers$")]
    diff_ids: Annotated[list[Digest], Field(min_length=1, max_length=_MOST)]


class ImageConfig(_Part):
    """A config, as far as an image on top of it needs it."""

    os: str
    architecture: str
    settings: RunSettings | None = Field(None, alias="config")
    rootfs: _RootFs
    history: Annotated[list[Past], _Bounded] | None = None

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.architecture}"

    @property
    def runs(self) -> RunSettings:
        return self.settings or RunSettings.model_validate({})

    def variables(self) -> dict[str, str]:
        """The environment; of a name that appears twice the last one counts, as in a process."""
        pairs = [line.partition("=") for line in self.runs.env or []]
        return {name: value for name, _, value in pairs}

    def past(self) -> list[dict[str, Any]] | None:
        """The history as it is written, where it has exactly one step for each layer."""
        steps = self.history or []
        # some tools write no history, or one too short; a wrong one would misname our layers
        if sum(not step.empty_layer for step in steps) != len(self.rootfs.diff_ids):
            return None
        return [step.model_dump(exclude_none=True) for step in steps]


def read_image_config(data: bytes) -> ImageConfig:
    """A config whose used parts are sound, or an error that names the first that is not."""
    name = f"the config {sha256_of(data)}"
    value = read_document_json(data, name)
    try:
        return ImageConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"]) or "it"
        raise BaseUnusable(
            f"{name}: {without_controls(field)}: {without_controls(first['msg'])}"
        ) from error
