"""Locked sets of real bytes on disk."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pipeline.weights.model import FilePin, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import LockedFolder, new_place

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {
    ".gitattributes": b"*.safetensors filter=lfs\n",
    "config.json": b'{"model_type": "tiny"}\n',
    "empty.txt": b"",
    "modeling_tiny.py": b"print('remote code')\n",
    "sub dir/ü ñ/modèle #1%.json": b"x" * 1000,
}


@lru_cache(maxsize=64)
def random_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """The same bytes every time."""
    return random.Random(seed).randbytes(n_bytes)


@lru_cache(maxsize=64)
def pin_of(path: str, data: bytes, *, large: bool) -> FilePin:
    """A file's pin, as the Hub would have it."""
    if large:
        return FilePin(path=path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return FilePin(path=path, size_bytes=len(data), git_sha1=blob)


def make_set(
    folder: Path,
    small: Mapping[str, bytes],
    large: Mapping[str, bytes],
    *,
    hub_cache: bool = False,
    repository: str = "org/tiny",
    name: str = "tiny",
    commit: str = COMMIT,
) -> LockedFolder:
    """Write the files and their lock."""
    pins = [pin_of(path, data, large=False) for path, data in small.items()]
    pins += [pin_of(path, data, large=True) for path, data in large.items()]
    spec = WeightsSpec(
        name=name,
        repository=repository,
        format="safetensors",
        quant="bf16",
        about="A set of weights that is only here for the tests.",
    )
    place = new_place(folder, sealed_weights_lock(spec, commit, pins), hub_cache=hub_cache)
    for pin in place.lock.files:
        write(place, pin, {**small, **large}[pin.path])
    place.keep_lock()
    return place


def write(place: LockedFolder, pin: FilePin, data: bytes) -> None:
    """Put one file in its place, with its link in the Hub's layout."""
    place.file(pin).parent.mkdir(parents=True, exist_ok=True)
    place.file(pin).write_bytes(data)
    if place.hub_cache:
        place.name(pin).parent.mkdir(parents=True, exist_ok=True)
        place.name(pin).symlink_to(link_target(pin))


def link_target(pin: FilePin) -> str:
    """What the Hub's own client writes into the link of a file."""
    return "../" * (2 + pin.path.count("/")) + f"blobs/{pin.want}"


def contents(root: Path) -> dict[str, bytes]:
    """All files of a folder but those that tools keep for themselves."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] not in (".sm120", ".cache")
    }
