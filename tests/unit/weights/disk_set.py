"""A small locked set on disk, in either layout, and a second copy to repair it from."""

from __future__ import annotations

import hashlib
import io
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from pipeline.core.errors import SourceUnreachable
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import plain_settings
from pipeline.weights.check.repair import RouteSupply
from pipeline.weights.check.verify import Checked, VerifyReport, WeightsVerifyOptions, verify_files
from pipeline.weights.model import FilePin, WeightsLock, WeightsSpec, sealed_weights_lock
from pipeline.weights.place import LockedFolder, new_place
from pipeline.weights.transfer.router import ByteStream, NotAvailable
from tests.testbed.locked_set import link_target

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@lru_cache(maxsize=64)
def random_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def small_files() -> dict[str, bytes]:
    """Two shards of one size, a module, configs in two folders, an empty file."""
    return {
        "model-1.safetensors": random_bytes(1, 300_000),
        "model-2.safetensors": random_bytes(2, 300_000),
        "config.json": b'{"a": 1}\n',
        "modeling.py": b"print('hello')\n",
        "sub/more.json": b"{}\n",
        "empty.txt": b"",
    }


@lru_cache(maxsize=64)
def pin_of(path: str, data: bytes) -> FilePin:
    """As the Hub does it: SHA-256 for large files, git's hash for small ones."""
    if path.endswith((".safetensors", ".gguf")):
        return FilePin(path=path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return FilePin(path=path, size_bytes=len(data), git_sha1=blob)


def lock_of(files: Mapping[str, bytes], name: str = "tiny") -> WeightsLock:
    spec = WeightsSpec(
        name=name,
        repository="org/tiny",
        format="safetensors",
        quant="bf16",
        about="A set of weights that is only here for the tests.",
    )
    return sealed_weights_lock(spec, COMMIT, [pin_of(path, data) for path, data in files.items()])


@dataclass(frozen=True)
class FolderSource:
    """The simplest copy: files by their paths."""

    folder: Path

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]:
        path = self.folder / pin.path
        if not path.is_file():
            raise SourceUnreachable(f"there is no {pin.path}")
        with path.open("rb") as handle:
            handle.seek(start)
            while start < stop and (data := handle.read(min(stop - start, 1 << 20))):
                start += len(data)
                yield data


class Copy(Protocol):
    """Anything with bytes to read."""

    def read(self, pin: FilePin, start: int, stop: int) -> Iterator[bytes]: ...


@dataclass(eq=False)
class CopyAsRoute:
    """A copy as a fetch asks it."""

    copy: Copy
    name: str = "copy"
    is_shared: bool = False

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        try:
            pieces = list(self.copy.read(pin, start, stop))
        except SourceUnreachable as error:
            raise NotAvailable(error, only_this_file=True) from error
        data = io.BytesIO(b"".join(pieces))
        return ByteStream("the copy", data.readinto, data.close, stop - start)


def supply_of(copies: Sequence[Copy]) -> RouteSupply:
    return RouteSupply([CopyAsRoute(copy) for copy in copies], NetClient(plain_settings()))


@dataclass(frozen=True)
class DiskSet:
    """A place with its files, and the folder of a right copy."""

    place: LockedFolder
    files: Mapping[str, bytes]
    copy: Path

    @property
    def source(self) -> FolderSource:
        return FolderSource(self.copy)

    def pin(self, path: str) -> FilePin:
        return next(pin for pin in self.place.lock.files if pin.path == path)

    def path(self, path: str) -> Path:
        """Where a file's bytes lie."""
        return self.place.file(self.pin(path))

    def check(self, **request: object) -> Checked:
        return verify_files(self.place, WeightsVerifyOptions(**request))  # type: ignore[arg-type]

    def report(self, **request: object) -> VerifyReport:
        return self.check(**request).report

    def kinds(self, **request: object) -> dict[str, str]:
        """The damage, by path."""
        return {f.path: f.kind for f in self.report(**request).damage}

    def holds_all(self) -> bool:
        """Whether every name gives the right bytes, judged without the code under test."""
        names = {path: self.place.name(self.pin(path)) for path in self.files}
        return all(names[path].read_bytes() == data for path, data in self.files.items())


def write_set(place: LockedFolder, files: Mapping[str, bytes]) -> None:
    for pin in place.lock.files:
        place.file(pin).parent.mkdir(parents=True, exist_ok=True)
        place.file(pin).write_bytes(files[pin.path])
        if place.hub_cache:
            place.name(pin).parent.mkdir(parents=True, exist_ok=True)
            place.name(pin).symlink_to(link_target(pin))
    place.keep_lock()


def make_set(
    folder: Path, files: Mapping[str, bytes] | None = None, *, hub_cache: bool = False
) -> DiskSet:
    files = small_files() if files is None else files
    place = new_place(folder / "set", lock_of(files), hub_cache=hub_cache)
    write_set(place, files)
    copy = folder / "copy"
    for path, data in files.items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(data)
    return DiskSet(place, files, copy)


def flip(path: Path, at: int) -> None:
    """Change one byte in place."""
    with path.open("r+b") as handle:
        handle.seek(at)
        old = handle.read(1)
        handle.seek(at)
        handle.write(bytes([old[0] ^ 0x40]))


def settle() -> None:
    """Wait until what was written is older than a tick of the quick clock."""
    time.sleep(0.03)


def put_back_mtime(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
