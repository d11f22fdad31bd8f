"""An engine's own files, as published or with patches, in a folder that workers import from.

Also what it takes to prepare any image for its gates: the store, layers and wheels.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import GateEnvironment, PatchConflict, ResolveFailed, StoreDamaged
from pipeline.core.files import on_all_cores, os_errors_explained, write_bytes
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import with_login
from pipeline.images.assemble import patch
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.assemble.locked_layers import make_layers
from pipeline.images.assemble.plan import ImagePlan, LayerKind, LayerPlan, Work
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.lock.make import tag_ranks, wheel_order, wheel_rank
from pipeline.images.lock.model import WheelPin
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchSpec

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

# Part of every tree's key: raised when the same wheel is unpacked differently.
FORMAT = 1
# What importing and choosing block sizes reads: code, tables of tuned configurations, and sources
# of kernels that are compiled at run time, whose folders some modules look for.
_KEPT_SUFFIXES = (
    *(".py", ".json", ".yaml", ".yml", ".toml", ".txt", "METADATA"),
    *(".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc"),
)
_LARGEST_BYTES = 4 << 20  # larger ones are bundled data
# How many neighbouring versions of torch are tried before giving up.
MOST_TRIED = 6


class WheelFinder:
    """Asks the configured indexes for one wheel of an exact version."""

    def __init__(self, client: NetClient) -> None:
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

    def versions(
        self, project: str, *, withdrawn: bool = False, since: datetime | None = None
    ) -> list[Version]:
        """Lists every version that has a wheel, oldest first; also withdrawn ones on request.

        With `since`, those are left out that the index says are older.
        """
        versions = set()
        for _, package in self._listed(project):
            # many indexes give no time: https://peps.python.org/pep-0700/
            if since and package.upload_time and package.upload_time < since:
                continue
            if package.package_type == "wheel" and (withdrawn or not package.is_yanked):
                with suppress(InvalidVersion):
                    versions.add(Version(package.version or ""))
        return sorted(versions)

    def _listed(self, project: str) -> list[tuple[str, DistributionPackage]]:
        from pipeline.images.fetch.index import (
            list_index_files,  # slow to import; most gates ask no index
        )

        if project not in self._offers:
            self._offers[project] = [
                (index, package)
                for index in self._client.settings.indexes
                for package in list_index_files(self._client, index, project)
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
        # by how far they are in the list of published ones, the newer of two first
        wanted = Version(pin.version)
        ordered = sorted({*finder.versions(pin.name), wanted})
        place = ordered.index(wanted)
        near = sorted(ordered, key=lambda v: (abs(ordered.index(v) - place), v < wanted))
        released = [v for v in near if v != wanted and not v.is_prerelease]
        for version in released[:MOST_TRIED]:
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


@dataclass(frozen=True)
class GateContext:
    """What making environments and engine trees takes."""

    checkout: Checkout
    store: Store
    host: str  # this machine's platform
    make_fetcher: Callable[[], Fetcher]
    make_finder: Callable[[], WheelFinder]
    # who answers cases that have no answer yet, where that is not this machine
    ask: Callable[[Any, Sequence[Any]], list[Any]] | None = None

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


def unpack_kept(store: Store, layers: Iterable[LayerRecord], place: Placing, folder: Path) -> None:
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
        path.write_bytes(read_layer_file(store.blob_path(layer.digest), row))
        # ptxas must start; the image's owners and other bits do not count
        path.chmod(0o755 if row.mode & 0o111 else 0o644)

    with os_errors_explained(folder):
        for parent in sorted({(folder / to).parent for to in jobs}):
            parent.mkdir(parents=True, exist_ok=True)
        # the large libraries first, so that no core waits for the last one
        on_all_cores(write, sorted(jobs, key=lambda to: -jobs[to][1].size_bytes))


@dataclass(frozen=True)
class EngineTree:
    """A folder that holds one version of an engine."""

    folder: Path
    project: str
    version: str
    digest: str  # of the wheel and of what patches made of it
    is_locked: bool = True  # the image's lock names the wheel; other versions are not vouched for

    @property
    def package(self) -> str:
        return self.project.replace("-", "_")


def engine_pin(
    context: GateContext, plan: ImagePlan, project: str, version: str | None
) -> WheelPin:
    """Finds the locked wheel of the engine, or another version's in the index."""
    locked = locked_wheel(plan, project)
    if version is None or version == locked.version:
        return locked
    return context.make_finder().find(project, version, plan.venv.version, plan.platform)


def engine_tree(context: GateContext, plan: ImagePlan, pin: WheelPin) -> EngineTree:
    """Unpacks the engine's code as its wheel has it."""
    folder = _folder(context, pin)

    def place(row: FileRow) -> str | None:
        path = row.path.removeprefix(f"{plan.venv.site}/")
        if row.owner != pin.name or path == row.path or row.size_bytes > _LARGEST_BYTES:
            return None
        return path if path.endswith(_KEPT_SUFFIXES) else None

    with context.store.locked(f"gate-{folder.name}"):
        if not folder.is_dir():
            layers = context.layers([layer_of(plan, pin, plan.architecture)])
            with context.store.scratch() as scratch, os_errors_explained(folder):
                unpack_kept(context.store, layers, place, scratch / "engine")
                folder.parent.mkdir(parents=True, exist_ok=True)
                os.replace(scratch / "engine", folder)
    mark_used(folder)
    is_locked = pin in plan.lock.wheels
    return EngineTree(folder, pin.name, pin.version, f"sha256:{pin.sha256}", is_locked)


def engine_work(context: GateContext, plan: ImagePlan, pin: WheelPin) -> Work:
    """What unpacking the engine would fetch."""
    is_there = _folder(context, pin).is_dir()
    return context.work([] if is_there else [layer_of(plan, pin, plan.architecture)])


def _folder(context: GateContext, pin: WheelPin) -> Path:
    key = sha256_of(canonical_json([FORMAT, pin.sha256])).removeprefix("sha256:")[:32]
    return context.store.root / "gate" / "engines" / key


def patched_files(tree: EngineTree, patches: Sequence[PatchSpec], folder: Path) -> dict[str, bytes]:
    """The files that patches change, as they leave them; each must fit exactly."""
    changed: dict[str, bytes] = {}
    for spec in patches:
        for change in patch.parse(read_patch(folder / spec.file), spec.file):
            before = changed.get(change.path) or _read(tree.folder, change.path, spec.file)
            changed[change.path] = patch.apply(change, before, spec.file)
    return changed


def patched(
    tree: EngineTree, patches: Sequence[PatchSpec], folder: Path, context: GateContext
) -> EngineTree:
    """Applies patches to a tree; each must fit exactly, but the version may be another.

    The new tree has its own copies of the changed files, and links to all others.
    """
    changed = patched_files(tree, patches, folder)
    if not changed:
        return tree
    sums = {path: sha256_of(data) for path, data in changed.items()}
    digest = sha256_of(canonical_json([FORMAT, tree.digest, sums]))
    target = tree.folder.with_name(digest.removeprefix("sha256:")[:32])
    with context.store.locked(f"gate-{target.name}"):
        if not target.is_dir():
            with context.store.scratch() as scratch, os_errors_explained(target):
                copy = scratch / "engine"
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(tree.folder, copy, copy_function=os.link, ignore=ignore)
                for path, data in changed.items():
                    # a link shares its bytes with the published tree: replace it, never write to it
                    (copy / path).unlink()
                    (copy / path).write_bytes(data)
                os.replace(copy, target)
    mark_used(target)
    return replace(tree, folder=target, digest=digest)


def is_applied(tree: EngineTree, spec: PatchSpec, folder: Path) -> bool:
    """Whether the engine already holds a patch's own lines."""
    for change in patch.parse(read_patch(folder / spec.file), spec.file):
        try:
            text = _read(tree.folder, change.path, spec.file).decode()
        except PatchConflict:
            return False
        # upstream's lines may stand elsewhere in the file than the patch's
        if not all("".join(hunk.after) in text for hunk in change.hunks):
            return False
    return True


def compiler_requirements(tree: EngineTree) -> list[str]:
    """Lists what a version of an engine itself requires of torch and Triton."""
    requirements: set[str] = set()
    for path in tree.folder.glob("*.dist-info/METADATA"):
        head = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        for line in head.splitlines():
            name, _, value = line.partition(":")
            if name != "Requires-Dist":
                continue
            with suppress(InvalidRequirement):
                wanted = Requirement(value.strip())
                is_compiler = canonicalize_name(wanted.name) in ("torch", "triton")
                if is_compiler and "extra" not in str(wanted.marker or ""):
                    requirements.add(str(wanted))
    return sorted(requirements)


def modules_defining(tree: EngineTree, names: Sequence[str]) -> list[str]:
    """Finds the modules of an engine that define a function of one of these names."""
    begins = re.compile(rf"^\s*(?:async )?def (?:{'|'.join(map(re.escape, names))})\b", re.M)
    return [
        ".".join(path.relative_to(tree.folder).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((tree.folder / tree.package).rglob("*.py"))
        if begins.search(path.read_text(encoding="utf-8", errors="replace"))
    ]


def read_patch(path: Path) -> str:
    """A patch's text, line ends as they are."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchConflict(
            f"{path.name}: cannot be read ({error})",
            "`file` in series.yaml names a file of text beside it.",
        ) from error


def _read(folder: Path, path: str, name: str) -> bytes:
    place = (folder / path).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_file():
        raise PatchConflict(f"{name}: {path} is not in this version")
    return place.read_bytes()
