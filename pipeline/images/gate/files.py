"""The files that an image's gates are written in: its own, and those that several images share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from pipeline.core.errors import GateInvalid, SpecInvalid
from pipeline.core.model import Frozen, Name
from pipeline.core.yaml_file import read_yaml
from pipeline.images.spec.checkout import Checkout

Module = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", max_length=200)
]
# `flash_mla_*`: names of kernels, of the functions that launch them, or of their modules
Kernels = Annotated[str, StringConstraints(pattern=r"^[\w*]+$", min_length=4, max_length=80)]
Why = Annotated[str, StringConstraints(min_length=20, max_length=300)]
# What decides each gate's verdict. A patch that fits must also compute the right numbers.
_CASES = ("engine.yaml", "smem-*.yaml")
_FILES = {
    "smem": _CASES,
    "numerics": (*_CASES, "numerics.yaml"),
    "patches": (*_CASES, "numerics.yaml"),
    "arch": ("arch.yaml",),
}
_SHARED = "common/gates"


class EngineSetup(Frozen):
    """`gates/engine.yaml`: how the engine's package is imported outside its own server."""

    schema_name: ClassVar[str] = "engine"

    package: Name
    shared: Name | None = Field(
        default=None,
        description="a folder below images/common/gates whose case files this image has too",
    )
    bare: list[Module] = Field(
        default=[],
        description="packages whose __init__.py is skipped, because it starts the whole engine",
    )
    wheels: list[Name] = Field(
        default=[],
        description="wheels that the cases use, beyond torch, Triton and what those need",
    )
    not_judged: dict[Kernels, Why] = Field(
        default={},
        description="kernels that no case can judge, by a pattern of their names, and why",
    )


def read_setup(checkout: Checkout, image: str) -> EngineSetup:
    """An image's engine.yaml; an image without one has no gates that call its engine."""
    path = checkout.folder(image) / "gates" / "engine.yaml"
    if not has_cases(checkout, image):
        raise GateInvalid(
            f"{image}: has no gates ({path.parent} holds no engine.yaml)",
            "It has nothing to judge; `sm120 gate run sglang-k2` does.",
        )
    setup = read_yaml(path, EngineSetup)
    if setup.shared and not (checkout.folder(_SHARED) / setup.shared).is_dir():
        raise GateInvalid(
            f"{path}: shared: images/{_SHARED}/{setup.shared} does not exist",
            "Name a folder that is there, or leave `shared` out.",
        )
    return setup


def has_cases(checkout: Checkout, image: str) -> bool:
    """Whether an image has gates that call its engine."""
    return (checkout.folder(image) / "gates" / "engine.yaml").is_file()


def parser_owner(checkout: Checkout, image: str) -> str:
    """The image whose parsers.yaml counts: its own, else that of the base whose engine it has."""
    folder = checkout.folder(image)
    if (folder / "gates" / "parsers.yaml").is_file() or not (folder / "image.yaml").is_file():
        return image
    base = checkout.spec(image).base
    return parser_owner(checkout, base) if isinstance(base, str) else image


def parser_files(checkout: Checkout, image: str) -> dict[str, Path]:
    """An image's parsers.yaml, with the formats and truths that all images share."""
    owner, shared = parser_owner(checkout, image), f"{_SHARED}/parsers"
    own = checkout.folder(owner) / "gates" / "parsers.yaml"
    if not own.is_file():
        return {}
    files = sorted(checkout.folder(shared).glob("*.yaml"))
    name = "gates/parsers.yaml" if owner == image else f"{owner}/gates/parsers.yaml"
    return {**{f"{shared}/{path.name}": path for path in files}, name: own}


def template_files(checkout: Checkout, image: str) -> dict[str, Path]:
    """An image's templates.yaml, the templates that images share, and what its parsers are."""
    shared, own = f"{_SHARED}/templates", checkout.folder(image) / "gates" / "templates.yaml"
    if not own.is_file():
        return {}
    files = {
        f"{shared}/{path.name}": path for path in sorted(checkout.folder(shared).glob("*.yaml"))
    }
    return {**files, **parser_files(checkout, image), "gates/templates.yaml": own}


def gate_files(checkout: Checkout, image: str, gate: str, platform: str = "") -> dict[str, Path]:
    """Finds the files that decide a gate's verdict, by the names that evidence has for them.

    Shared files come first and are named by their path below images/, the image's own by their
    path below its folder. Objects differ by platform, and so may the file about them.
    """
    if gate in ("parsers", "templates"):
        return (parser_files if gate == "parsers" else template_files)(checkout, image)
    folders = {"gates": checkout.folder(image) / "gates"}
    try:
        shared = read_setup(checkout, image).shared
    except (GateInvalid, SpecInvalid):  # an error where it is used; here it names no other file
        shared = None
    if shared and gate != "arch":  # what an image's objects hold is its own
        name = f"{_SHARED}/{shared}"
        folders = {name: checkout.folder(name), **folders}
    patterns = _FILES.get(gate, ())
    special = f"arch.{platform.partition('/')[2]}.yaml"
    if gate == "arch" and (folders["gates"] / special).is_file():
        patterns = (special,)
    # a patch may be one of a parser, or of what renders
    both = (parser_files(checkout, image), template_files(checkout, image))
    chat = both[0] | both[1] if gate == "patches" else {}
    return chat | {
        f"{name}/{path.name}": path
        for name, folder in folders.items()
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }
