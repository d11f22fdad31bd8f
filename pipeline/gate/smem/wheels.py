"""Wheels outside an image's lock: another version of its engine, or this machine's platform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from pipeline.errors import GateEnvironment, ResolveFailed
from pipeline.fetch.http import Client
from pipeline.fetch.settings import with_login
from pipeline.files import write_bytes
from pipeline.lock.model import WheelPin
from pipeline.lock.wheels import tag_ranks, wheel_order, wheel_rank

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

# How many neighbouring versions of torch are tried before giving up.
MOST_TRIED = 6


class WheelFinder:
    """Asks the configured indexes for one wheel of an exact version."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offers: dict[str, list[tuple[str, DistributionPackage]]] = {}

    def find(self, project: str, version: str, python: str, platform: str) -> WheelPin:
        """The wheel an installer would choose, by the hash that the index gives."""
        index, package = self._chosen(project, version, python, platform)
        return self._pinned(project, version, index, package)

    def _chosen(
        self, project: str, version: str, python: str, platform: str
    ) -> tuple[str, DistributionPackage]:
        ranks = tag_ranks(python, platform)
        fitting = [
            (index, package)
            for index, package in self._listed(project)
            if wheel_rank(package.filename, ranks) < len(ranks)
            and parse_wheel_filename(package.filename)[1] == Version(version)
        ]
        if not fitting:
            raise ResolveFailed(
                f"{project} {version}: no index has a wheel for {platform}",
                "Name another version; `sm120 image sources` shows which indexes are asked.",
            )
        return min(fitting, key=lambda offer: wheel_order(offer[1].filename, ranks))

    def _pinned(
        self, project: str, version: str, index: str, package: DistributionPackage
    ) -> WheelPin:
        sha256 = package.digests.get("sha256")
        if not sha256:
            raise ResolveFailed(f"{package.filename}: the index gives no sha256 for it")
        # indexes name sizes only since https://peps.python.org/pep-0700/
        size = package.size or self._client.size_of(with_login(package.url, index))
        name = str(canonicalize_name(project))
        return WheelPin(
            name=name, version=version, file=package.filename, size_bytes=size, sha256=sha256
        )

    def versions(self, project: str, *, withdrawn: bool = False) -> list[Version]:
        """Every version that has a wheel, oldest first; also withdrawn ones where those count."""
        versions = set()
        for _, package in self._listed(project):
            if package.package_type == "wheel" and (withdrawn or not package.is_yanked):
                with suppress(InvalidVersion):
                    versions.add(Version(package.version or ""))
        return sorted(versions)

    def _listed(self, project: str) -> list[tuple[str, DistributionPackage]]:
        from pipeline.fetch.index import list_files  # slow to import; most gates ask no index

        if project not in self._offers:
            self._offers[project] = [
                (index, package)
                for index in self._client.settings.indexes
                for package in list_files(self._client, index, project)
            ]
        return self._offers[project]


def for_host(
    pin: WheelPin, python: str, host: str, folder: Path, make_finder: Callable[[], WheelFinder]
) -> WheelPin:
    """The same wheel for this machine, looked up once and then kept in the folder."""
    # such a wheel is the same file on every machine
    if pin.file.endswith("-none-any.whl"):
        return pin
    name = f"{pin.name}-{pin.version}-py{python}.json"
    path = folder / host.replace("/", "-") / name
    try:
        return WheelPin.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        wheel = _looked_up(make_finder(), pin, python, host)
        write_bytes(path, wheel.model_dump_json().encode())
        return wheel


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
