"""Locks of images and sources: what answers a spec, with no word of where the bytes come from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints

from pipeline.artifacts.oci.document import LayerType
from pipeline.core.errors import LockEdited, LockStale
from pipeline.core.files import write_bytes
from pipeline.core.model import (
    FILE_VERSION,
    Digest,
    FileName,
    Frozen,
    Hex,
    Name,
    Platform,
    RelativePath,
    RepositoryPath,
)
from pipeline.core.sealed import UNSEALED, Sealed, read_sealed
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import ImageSpec, PythonSpec
from pipeline.images.spec.source import SourceSpec

Size = Annotated[int, Field(gt=0)]
MOST_LAYERS = 127  # more than that no container engine mounts


class BlobPin(Frozen):
    """A part of a foreign base: an index, a manifest or a config."""

    digest: Digest
    size_bytes: Size


class LayerPin(BlobPin):
    """A layer of a foreign base, taken as it is."""

    diff_id: Digest
    media_type: LayerType


class BasePin(Frozen):
    """A foreign base for one platform: every document and layer by digest, and no place."""

    repository: RepositoryPath
    index: BlobPin | None
    manifest: BlobPin
    config: BlobPin
    layers: Annotated[list[LayerPin], Field(min_length=1, max_length=MOST_LAYERS)]

    def __str__(self) -> str:
        return f"{self.repository}@{self.manifest.digest}"

    @property
    def asked(self) -> str:
        """The digest that the spec names."""
        return (self.index or self.manifest).digest

    @property
    def documents(self) -> list[BlobPin]:
        """Index and manifest, then the config: small, and all that decides but the layers."""
        return [*([self.index] if self.index else []), self.manifest, self.config]

    @property
    def blobs(self) -> list[BlobPin]:
        """Config and layers, each once."""
        sizes = {x.digest: x.size_bytes for x in (self.config, *self.layers)}
        return [BlobPin(digest=d, size_bytes=n) for d, n in sizes.items()]


# PEP 440 has `!` and `+`, Debian `~` and `:`
Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.+~:!_-]+$")]


def split_variant(file: str) -> tuple[str, str]:
    """A wheel's file name without its variant label (PEP 825), and that label; mostly empty.

    A variant has its label behind the platform: peps.python.org/pep-0825.
    """
    *parts, last = file.removesuffix(".whl").split("-")
    # five parts, or six with a build number, which begins with a digit, are no variant's
    has_build = parts[2:3] and parts[2][:1].isdigit()
    if len(parts) != (6 if has_build else 5):
        return file, ""
    return f"{'-'.join(parts)}.whl", last


class WheelPin(Frozen):
    """One wheel. The name is for people, the digest is what is used.

    A variant (PEP 825) has its label in the name of its file.
    """

    name: Name
    version: Version
    file: FileName
    size_bytes: Size
    sha256: Hex


class DebPin(Frozen):
    """One .deb, with its path below any Debian mirror."""

    name: Name
    version: Version
    path: RelativePath
    size_bytes: Size
    sha256: Hex

    @property
    def file(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def source(self) -> str | None:
        """The source package, for which a pool has a folder; none in a pool of another form."""
        *_, letter, folder, _ = ("", "", *self.path.split("/"))
        is_pool = letter == (folder[:4] if folder.startswith("lib") else folder[:1]) != ""
        return folder if is_pool else None


class ArchivePin(Frozen):
    """A source archive. Where it can be asked for follows from its kind."""

    kind: Literal["sdist", "debian", "file"]
    name: Name
    version: Version | Literal[""] = ""
    path: RelativePath | None = Field(default=None, description="below a Debian mirror")
    file: FileName
    size_bytes: Size
    sha256: Hex


Pin = WheelPin | DebPin | ArchivePin


class ImageLock(Sealed):
    """Everything an image is made of for one platform, beyond its base."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    image: Name
    platform: Platform
    spec: Digest
    base_lock: Digest | None = None
    base_image: BasePin | None = None
    wheels: list[WheelPin] = []
    debs: list[DebPin] = []
    seal: Digest  # last in the file: it covers all above

    def unsealed(self) -> set[str]:
        """A lock without a foreign base has the same seal as before foreign bases existed."""
        return {"base_image"} if self.base_image is None else set()

    @property
    def pins(self) -> list[Pin]:
        return [*self.wheels, *self.debs]


def sealed_lock(
    image: str,
    platform: str,
    spec: str,
    base_lock: str | None,
    wheels: list[WheelPin],
    debs: list[DebPin],
    base_image: BasePin | None = None,
) -> ImageLock:
    """Sorts and seals a new lock."""
    return ImageLock(
        image=image,
        platform=platform,
        spec=spec,
        base_lock=base_lock,
        base_image=base_image,
        wheels=sorted(wheels, key=lambda w: w.name),
        debs=sorted(debs, key=lambda d: d.name),
        seal=UNSEALED,
    ).sealed()


def write_lock(path: Path, lock: ImageLock) -> None:
    """Put the lock in its place, whole: a line a pin, so that a diff shows only what moved."""
    lines = [
        "# Written by `sm120 image lock`; do not edit: the seal would not match, and builds stop.",
        f"format: {lock.format}",
        # quoted only where YAML would read a number or a truth value
        f"image: {yaml.safe_dump(lock.image).splitlines()[0]}",
        f"platform: {lock.platform}",
        f"spec: {lock.spec}",
        f"base_lock: {lock.base_lock or 'null'}",
    ]
    if lock.base_image is not None:
        fields: dict[str, Any] = lock.base_image.model_dump()
        layers = fields.pop("layers")
        lines += ["base_image:", *(f"  {name}: {json.dumps(x)}" for name, x in fields.items())]
        lines += ["  layers:", *(f"  - {json.dumps(layer)}" for layer in layers)]
    for title, pins in (("wheels", lock.wheels), ("debs", lock.debs)):
        lines.append(f"{title}:" if pins else f"{title}: []")
        lines += [f"- {json.dumps(pin.model_dump(), ensure_ascii=False)}" for pin in pins]
    write_bytes(path, "\n".join([*lines, f"seal: {lock.seal}", ""]).encode())


def read_lock(path: Path) -> ImageLock:
    """A lock that is whole and unedited."""
    return read_sealed(path, ImageLock, missing="Make it with `sm120 image lock IMAGE`.")


def current_lock(checkout: Checkout, spec: ImageSpec, platform: str) -> ImageLock:
    """Reads the lock of an image, and proves that it answers today's spec and today's base."""
    path = checkout.lock_path(spec.name, platform)
    lock = read_lock(path)
    if lock.image != checkout.written(spec.name) or lock.platform != platform:
        raise LockEdited(f"{path.name}: is the lock of {lock.image} for {lock.platform}")
    if lock.spec != spec.lock_digest():
        raise LockStale(f"{path.name}: the spec has changed since it was locked")
    # the base's .debs decide which of the image's are left out
    if spec.parent is not None:
        base = read_lock(checkout.lock_path(spec.parent, platform))
        if lock.base_lock != base.seal:
            raise LockStale(f"{path.name}: the lock of its base {spec.parent} has changed since")
    # a foreign base is locked if and only if it is asked for, and is that one
    want, got = spec.foreign, lock.base_image
    locked = (got.repository, got.asked) if got else None
    if locked != ((want.repository, want.digest) if want else None):
        raise LockEdited(f"{path.name}: its base image is not the one in the spec")
    return lock


_HINT = "`sm120 source lock NAME` renews it; with --dry-run it shows what would change."


class SourceLock(Sealed):
    """Which files a source consists of."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    source: Name
    spec: Digest
    archive: ArchivePin
    tree: Digest  # of all files, whatever archive they came in
    files: Annotated[int, Field(gt=0)]
    seal: Digest


def write_source_lock(path: Path, lock: SourceLock) -> None:
    """Put the lock in its place, whole."""
    body = lock.model_dump(exclude_none=True)
    lines = [
        "# Written by `sm120 source lock`; do not edit: the seal would not match, and builds stop.",
        *(f"{key}: {json.dumps(x) if key == 'archive' else x}" for key, x in body.items()),
    ]
    write_bytes(path, "\n".join([*lines, ""]).encode())


def read_source_lock(path: Path) -> SourceLock:
    """A lock that is whole and unedited."""
    return read_sealed(path, SourceLock, missing="Make it with `sm120 source lock NAME`.")


def current_source_lock(path: Path, spec: SourceSpec) -> SourceLock:
    """Reads the lock of a source, and proves that it answers today's spec."""
    lock = read_source_lock(path)
    if lock.source != spec.name:
        raise LockEdited(f"{path.name}: is the lock of {lock.source}", _HINT)
    if lock.spec != spec.lock_digest():
        raise LockStale(f"{path.name}: the spec has changed since it was locked", _HINT)
    return lock


class Move(Frozen):
    """A package that appeared, went, changed its version, or changed its bytes.

    If no package did, the lock itself, whose seal shows it.
    """

    image: str
    platform: str
    kind: str
    name: str
    before: str | None
    after: str | None


def diff_locks(old: ImageLock | None, new: ImageLock) -> list[Move]:
    """Every difference, sorted by name."""
    moves: list[Move] = []
    move = partial(Move, image=new.image, platform=new.platform)
    was_base, base = old.base_image if old else None, new.base_image
    if (named := base or was_base) and was_base != base:
        before, after = (each.manifest.digest if each else None for each in (was_base, base))
        moves.append(move(kind="base", name=named.repository, before=before, after=after))
    for kind, pins in (("wheel", "wheels"), ("deb", "debs")):
        old_pins: dict[str, Pin] = {p.name: p for p in (getattr(old, pins) if old else [])}
        new_pins: dict[str, Pin] = {p.name: p for p in getattr(new, pins)}
        for name in sorted(old_pins.keys() | new_pins.keys()):
            was, now = old_pins.get(name), new_pins.get(name)
            if was != now:
                before, after = _shown(was, now), _shown(now, was)
                moves.append(move(kind=kind, name=name, before=before, after=after))
    seal = old.seal if old else None
    # an image may have no package of its own, and a spec may change without moving one
    if not moves and seal != new.seal:
        moves.append(move(kind="lock", name=new.image, before=seal, after=new.seal))
    return moves


def _shown(pin: Pin | None, other: Pin | None) -> str | None:
    """The version; with the file's digest where only the bytes differ."""
    if pin is None:
        return None
    # the same version twice would look like no change
    if other is not None and pin.version == other.version:
        return f"{pin.version} ({pin.sha256[:12]})"
    return pin.version


def requirements(lock: ImageLock) -> str:
    """For `pip install --no-deps --require-hashes -r`."""
    # a lock is of one platform, which neither format can state
    head = f"# {lock.image} for {lock.platform}, from the lock {lock.seal}\n"
    lines = [f"{w.name}=={w.version} \\\n    --hash=sha256:{w.sha256}\n" for w in lock.wheels]
    return head + "".join(lines)


def pylock(lock: ImageLock, python: PythonSpec) -> str:
    """PEP 751, which wants a place for each wheel: a file beside it, as a lock has no addresses."""
    lines = [
        f"# {lock.image} for {lock.platform}, from the lock {lock.seal}",
        'lock-version = "1.0"',
        'created-by = "sm120-pipeline"',
        f'requires-python = "=={python.version}.*"',
    ]
    for wheel in lock.wheels:
        file = json.dumps(wheel.file)
        lines += [
            "",
            "[[packages]]",
            f"name = {json.dumps(wheel.name)}",
            f"version = {json.dumps(wheel.version)}",
            f"wheels = [{{ name = {file}, path = {file}, size = {wheel.size_bytes},"
            f' hashes = {{ sha256 = "{wheel.sha256}" }} }}]',
        ]
    return "\n".join(lines) + "\n"
