"""An image's wheels for this machine's processor, where that is another than the image's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version
from pydantic import ValidationError

from pipeline.errors import GateEnvironment, ResolveFailed
from pipeline.files import write_bytes
from pipeline.lock.model import WheelPin

if TYPE_CHECKING:
    from pipeline.gate.smem.wheels import WheelFinder

MOST_TRIED = 6


def for_host(
    pin: WheelPin, python: str, host: str, folder: Path, make_finder: Callable[[], WheelFinder]
) -> WheelPin:
    """The same wheel for this machine, looked up once and then kept in the folder."""
    if pin.file.endswith("-none-any.whl"):
        return pin
    name = f"{pin.name}-{pin.version}-py{python}.json"
    path = folder / host.replace("/", "-") / name
    try:
        return WheelPin.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        found = _looked_up(make_finder(), pin, python, host)
        write_bytes(path, found.model_dump_json().encode())
        return found


def _looked_up(finder: WheelFinder, pin: WheelPin, python: str, host: str) -> WheelPin:
    try:
        return finder.find(pin.name, pin.version, python, host)
    except ResolveFailed:
        # torch only carries the tensors; anything else must be the image's own version
        if pin.name != "torch":
            raise
    for version in nearest(Version(pin.version), finder.versions(pin.name))[:MOST_TRIED]:
        with suppress(ResolveFailed):
            return finder.find(pin.name, str(version), python, host)
    raise GateEnvironment(
        f"torch {pin.version}: no version near it has a wheel for {host}",
        "Judge the image on a machine of its own platform.",
    )


def nearest(wanted: Version, offered: Sequence[Version]) -> list[Version]:
    """Versions by how far they are in the list of published ones, the newer of two first."""
    ordered = sorted({*offered, wanted})
    place = ordered.index(wanted)
    by_distance = sorted(ordered, key=lambda v: (abs(ordered.index(v) - place), v < wanted))
    return [v for v in by_distance if v != wanted and not v.is_prerelease]
