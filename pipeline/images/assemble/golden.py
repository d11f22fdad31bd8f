"""The digest each lock must produce, committed: the proof across machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import GoldenMismatch
from pipeline.core.files import locked, write_bytes
from pipeline.core.model import Digest, Frozen
from pipeline.core.yaml_file import read_yaml

_HEAD = "# Written by `sm120 build --accept`: what each lock must produce, on any machine.\n"


class GoldenImage(Frozen):
    """An image's expected digest, with the inputs and layers it was made of."""

    digest: Digest
    inputs: dict[str, Any]
    layers: dict[str, Digest]


class Golden(Frozen):
    """All expected digests, by `image.architecture`."""

    images: dict[str, GoldenImage] = {}


def read_golden(path: Path) -> Golden:
    """The committed digests; none where there is no file yet."""
    return read_yaml(path, Golden) if path.exists() else Golden()


def check_golden(golden: Golden, name: str, got: GoldenImage) -> None:
    """Stops a build that came out different, and names the reason."""
    want = golden.images.get(name)
    # an image's own name: without it, --accept would take all images
    accept = f"`sm120 build {name.rpartition('.')[0]} --accept`"
    if want is None:
        message = f"{name}: no expected digest is committed; it came out as {got.digest}"
        raise GoldenMismatch(message, f"Compare with another machine, then {accept} and commit.")
    if want.digest == got.digest:
        return
    # changed inputs are the usual reason, and no defect: they are named first
    moved = [k for k in got.inputs if got.inputs[k] != want.inputs.get(k)]
    if moved:
        raise GoldenMismatch(
            f"{name}: {got.digest} instead of {want.digest}, because these inputs changed:"
            f" {', '.join(moved)}",
            f"If they changed on purpose: {accept}, and commit.",
        )
    differing = (title for title in got.layers if want.layers.get(title) != got.layers[title])
    first = next(differing, None)
    where = f"the first layer that differs is {first!r}"
    if first is None:
        where = "all layers are equal, the config or manifest differs"
    raise GoldenMismatch(
        f"{name}: {got.digest} instead of {want.digest} from the same inputs; {where}",
        "Build into an empty folder (--store DIR): if that gives the expected digest, somebody"
        " changed this store; else it is a defect, please report it.",
    )


def accept_golden(path: Path, name: str, got: GoldenImage) -> None:
    """Writes a new expected digest."""
    # two builds with --accept at once would each lose the other's entry
    with locked(path.parent / ".golden.lock"):
        images = {**read_golden(path).images, name: got}
        body = {k: images[k].model_dump() for k in sorted(images)}
        text = yaml.safe_dump({"images": body}, sort_keys=False, width=100)
        write_bytes(path, (_HEAD + text).encode())
