"""Finding a locked file: folders and mirrors first, then the index or Debian's archive.

A source only proposes places; the bytes are judged by the lock. A pin names no place, so any
source that has the right bytes will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from urllib.parse import quote

from pipeline.core.errors import DigestMismatch, MirrorUnknown, SourceUnreachable
from pipeline.core.files import read_at_most
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.net.failures import NetError
from pipeline.core.net.http import Client
from pipeline.core.net.settings import folder_of, with_login
from pipeline.images.fetch.aptconf import DebianMirror, find_mirror
from pipeline.images.lock.model import ArchivePin, DebPin, Pin, WheelPin

# One package version has a handful of files.
_MOST_SNAPSHOT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere a file may be: a path here or an address elsewhere."""

    where: str
    local: bool = False


class Sources:
    """All the places this machine is configured to get files from."""

    def __init__(
        self, client: Client, mirror_finder: Callable[[], DebianMirror] | None = None
    ) -> None:
        self._client = client
        self._find_mirror = cache(mirror_finder or debian_mirror)

    def finders(self, pin: Pin, *, offline: bool) -> list[Callable[[], Iterator[Place]]]:
        """Ways to find a file, nearest first; each is asked only when those before it failed."""
        settings = self._client.settings
        folders = [f for m in settings.mirrors if (f := folder_of(m))]
        if not isinstance(pin, DebPin):
            # find-links of pip and uv are for wheels and sdists; .debs may lie in mirrors only
            folders += settings.folders
        near = [partial(_in_folder, folder, pin) for folder in folders]
        if offline:
            return [*near]
        addresses = [m for m in settings.mirrors if folder_of(m) is None]
        mirrors = [partial(_at_mirror, address, pin) for address in addresses]
        if isinstance(pin, DebPin):
            return [*near, *mirrors, partial(self._debian_places, pin)]
        if isinstance(pin, ArchivePin) and pin.kind == "debian":
            return [*near, *mirrors, partial(self._below_mirrors, pin.path or "")]
        if isinstance(pin, ArchivePin) and pin.kind == "file":
            return [*near, *mirrors]  # its name means something to the user alone
        indexes = [partial(self._index_places, index, pin) for index in settings.indexes]
        return [*near, *mirrors, *indexes]

    def _index_places(self, index: str, pin: WheelPin | ArchivePin) -> Iterator[Place]:
        from pipeline.images.fetch.index import (
            find_file,  # slow to import, and not every build asks
        )

        for package in find_file(self._client, index, pin.name, pin.file):
            # before a byte is fetched: a file that was replaced upstream is found out here
            offered = package.digests.get("sha256")
            if offered and offered != pin.sha256:
                raise DigestMismatch(
                    f"{pin.file}: locked as {pin.sha256}, the index offers {offered}"
                )
            yield Place(with_login(package.url, index))

    def _below_mirrors(self, path: str) -> Iterator[Place]:
        for base in self._find_mirror().bases_for(path):
            if folder := folder_of(base):
                yield Place(str(folder / path), local=True)
            else:
                # Debian's versions have + and ~, which its mirrors serve unescaped
                yield Place(f"{base.rstrip('/')}/{quote(path, safe='/+~')}")

    def _debian_places(self, pin: DebPin) -> Iterator[Place]:
        yield from self._below_mirrors(pin.path)
        # last: mirrors drop old versions, and this archive keeps them all
        if snapshot := os.environ.get("SM120_DEBIAN_SNAPSHOT"):
            yield from snapshot_places(self._client, snapshot, pin)


def _at_mirror(address: str, pin: Pin) -> Iterator[Place]:
    """An extra mirror holds files by name, or by sha256/<hex>."""
    yield Place(f"{address.rstrip('/')}/{quote(pin.file)}")
    yield Place(f"{address.rstrip('/')}/sha256/{pin.sha256}")


def _in_folder(folder: Path, pin: Pin) -> Iterator[Place]:
    # as `sm120 image collect` and `pip download` write them, in a folder a project, and by hash
    by_hash = (folder / pin.sha256, folder / "sha256" / pin.sha256)
    for path in (folder / pin.file, folder / pin.name / pin.file, *by_hash):
        if path.is_file():
            yield Place(str(path), local=True)


def read_below(client: Client, bases: Sequence[str], path: str, most_bytes: int) -> bytes:
    """A file of Debian's archive, from the first mirror that delivers it; larger is an error."""
    failures = []
    for base in bases:
        try:
            folder = folder_of(base)
            if folder is None:
                return client.read(f"{base.rstrip('/')}/{path}", most_bytes)
            if (data := read_at_most(folder / path, most_bytes)) is not None:
                return data
            failures.append(f"{folder / path}: is larger than {most_bytes} bytes")
        except OSError as error:
            failures.append(f"{base}: {error.strerror}")
        except SourceUnreachable as error:
            failures.append(str(error))
    if not bases:
        raise MirrorUnknown(
            f"no mirror is known for {path}", "Set SM120_DEBIAN_SECURITY_MIRROR to its address."
        )
    raise SourceUnreachable("; ".join(failures))


def debian_mirror() -> DebianMirror:
    """SM120_DEBIAN_MIRROR (and _SECURITY), else what apt uses on this machine."""
    if chosen := os.environ.get("SM120_DEBIAN_MIRROR"):
        security = os.environ.get("SM120_DEBIAN_SECURITY_MIRROR", "").split()
        return DebianMirror(main=tuple(chosen.split()), security=tuple(security))
    return find_mirror()


def snapshot_places(client: Client, base: str, pin: DebPin) -> Iterator[Place]:
    """Debian's snapshot archive keeps every version ever published, by SHA-1."""
    version = quote(pin.version, safe="")
    url = f"{base.rstrip('/')}/mr/binary/{pin.name}/{version}/binfiles?fileinfo=1"
    try:
        reply = client.fetch(url, _MOST_SNAPSHOT_BYTES)
        files = read_json(reply.data, most_bytes=_MOST_SNAPSHOT_BYTES)["fileinfo"]
        # epochs are not part of a file's name there, so the size tells the architectures apart
        fitting = [
            sha1 for sha1, copies in files.items() if pin.size_bytes in {c["size"] for c in copies}
        ]
    except (NetError, JsonInvalid, KeyError, TypeError, AttributeError):
        # a place less; the error that is shown is that of the mirrors before it
        return
    for sha1 in fitting:
        yield Place(f"{base.rstrip('/')}/file/{quote(sha1, safe='')}")
