"""What preparing an image for its gates takes: specs, the store, files out of layers, wheels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import GateEnvironment, ResolveFailed, StoreDamaged
from pipeline.core.files import on_all_cores, os_errors_explained, write_bytes
from pipeline.core.net.http import Client
from pipeline.core.net.settings import with_login
from pipeline.images.assemble.layer import read_file
from pipeline.images.assemble.locked_layers import make_layers
from pipeline.images.assemble.plan import ImagePlan, LayerKind, LayerPlan, Work
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.lock.make import tag_ranks, wheel_order, wheel_rank
from pipeline.images.lock.model import WheelPin
from pipeline.images.spec.checkout import Checkout

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
        """Finds the wheel an installer would choose, by the hash that the index gives."""
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
        index, package = min(fitting, key=lambda offer: wheel_order(offer[1].filename, ranks))
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
        """Lists every version that has a wheel, oldest first; also withdrawn ones on request."""
        versions = set()
        for _, package in self._listed(project):
            if package.package_type == "wheel" and (withdrawn or not package.is_yanked):
                with suppress(InvalidVersion):
                    versions.add(Version(package.version or ""))
        return sorted(versions)

    def _listed(self, project: str) -> list[tuple[str, DistributionPackage]]:
        from pipeline.images.fetch.index import (
            list_files,  # slow to import; most gates ask no index
        )

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
    """Looks up the same wheel for this machine once, and keeps it in the folder."""
    # such a wheel is the same file on every machine
    if pin.file.endswith("-none-any.whl"):
        return pin
    path = folder / host.replace("/", "-") / f"{pin.name}-{pin.version}-py{python}.json"
    try:
        return WheelPin.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        finder = make_finder()
    wheel = None
    try:
        wheel = finder.find(pin.name, pin.version, python, host)
    except ResolveFailed:
        # torch only carries the tensors; anything else must be the image's own version
        if pin.name != "torch":
            raise
        for version in nearest(Version(pin.version), finder.versions(pin.name))[:MOST_TRIED]:
            with suppress(ResolveFailed):
                wheel = finder.find(pin.name, str(version), python, host)
                break
    if wheel is None:
        raise GateEnvironment(
            f"torch {pin.version}: no version near it has a wheel for {host}",
            "Judge the image on a machine of its own platform.",
        )
    write_bytes(path, wheel.model_dump_json().encode())
    return wheel


def nearest(wanted: Version, offered: Sequence[Version]) -> list[Version]:
    """Sorts versions by how far they are in the list of published ones, the newer of two first."""
    ordered = sorted({*offered, wanted})
    place = ordered.index(wanted)
    by_distance = sorted(ordered, key=lambda v: (abs(ordered.index(v) - place), v < wanted))
    return [v for v in by_distance if v != wanted and not v.is_prerelease]


@dataclass(frozen=True)
class GateContext:
    """What making environments and engine trees takes."""

    checkout: Checkout
    store: Store
    host: str  # this machine's platform
    make_fetcher: Callable[[], Fetcher]
    make_finder: Callable[[], WheelFinder]

    def work(self, plans: Sequence[LayerPlan]) -> Work:
        """Finds which layers are missing, and what must be fetched for them."""
        missing = tuple(plan for plan in plans if not self.store.layer(plan.key))
        pins = {pin.sha256: pin for plan in missing for pin in plan.pins}.values()
        fetch = (p for p in pins if not self.store.has_input(p.sha256, p.size_bytes))
        return Work(missing, (), tuple(fetch))

    def layers(self, plans: Sequence[LayerPlan]) -> list[LayerRecord]:
        """Returns layers from the store, and makes those that are missing."""
        work = self.work(plans)
        if work.missing:
            self.store.need_space(work.disk_bytes)
            # a wheel's bytes are all in its layer, from which files are unpacked
            make_layers(self.store, work, self.make_fetcher(), keep_inputs=False)
        records = [self.store.layer(plan.key) for plan in plans]
        if any(record is None for record in records):
            raise StoreDamaged("a layer was removed from the store while it was in use")
        return [record for record in records if record is not None]


def locked_wheel(plan: ImagePlan, name: str) -> WheelPin:
    """The wheel of a project in an image's lock."""
    pin = next((pin for pin in plan.lock.wheels if pin.name == name), None)
    if pin is None:
        raise GateEnvironment(
            f"{plan.spec.name}: has no wheel of {name}",
            "The shared-memory gate is for images whose engine has Triton kernels.",
        )
    return pin


def layer_of(plan: ImagePlan, pin: WheelPin, architecture: str) -> LayerPlan:
    """The image's layer that holds a wheel, or one of its own for a wheel outside the lock."""
    for layer in plan.layers:
        if layer.kind is LayerKind.WHEELS and pin.sha256 in {p.sha256 for p in layer.pins}:
            return layer
    return LayerPlan(f"{pin.name} {pin.version}", LayerKind.WHEELS, architecture, (pin,), plan.venv)


def mark_used(path: Path) -> None:
    """Marks a kept file as used: `sm120 store trim` removes what had no use for a month."""
    with suppress(OSError):  # of another user, perhaps; the store only keeps it less long
        os.utime(path)


# The path below the folder for a file of the image; none leaves it out.
Placing = Callable[[FileRow], str | None]


def unpack(store: Store, layers: Iterable[LayerRecord], place: Placing, folder: Path) -> None:
    """Writes the files that `place` keeps, each checked by its hash."""
    jobs: dict[str, tuple[LayerRecord, FileRow]] = {}
    for layer in layers:
        for row in store.contents(layer):
            to = place(row) if row.kind in (Kind.FILE, Kind.SYMLINK) else None
            if to is not None:
                jobs[to] = (layer, row)

    def write(to: str) -> None:
        path, (layer, row) = folder / to, jobs[to]
        if row.kind == Kind.SYMLINK:
            # in the image it would lead elsewhere in the image; here, anywhere on this machine
            if not row.target.startswith("/") and ".." not in row.target.split("/"):
                path.symlink_to(row.target)
            return
        path.write_bytes(read_file(store.blob_path(layer.digest), row))
        # ptxas must start; the image's owners and other bits do not count
        path.chmod(0o755 if row.mode & 0o111 else 0o644)

    with os_errors_explained(folder):
        for parent in sorted({(folder / to).parent for to in jobs}):
            parent.mkdir(parents=True, exist_ok=True)
        # the large libraries first, so that no core waits for the last one
        on_all_cores(write, sorted(jobs, key=lambda to: -jobs[to][1].size_bytes))
