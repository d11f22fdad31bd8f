"""Finding a locked file: folders and mirrors first, then the index or Debian's archive.

A source only proposes places; the bytes are judged by the lock. A pin names no place, so any
source that has the right bytes will do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from urllib.parse import quote

from pypi_simple import NoSuchProjectError, ProjectPage, PyPISimple, UnsupportedContentTypeError
from requests import RequestException

from pipeline.errors import DigestMismatch, SourceUnreachable
from pipeline.fetch.aptconf import DebianMirror, find_mirror
from pipeline.fetch.http import Client
from pipeline.fetch.settings import masked
from pipeline.lock.model import DebPin, Pin, WheelPin


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
        self._pages: dict[tuple[str, str], ProjectPage | None] = {}
        self._page_locks: dict[tuple[str, str], threading.Lock] = {}
        self._guard = threading.Lock()

    def finders(self, pin: Pin, *, offline: bool) -> list[Callable[[], Iterator[Place]]]:
        """Ways to find a file, nearest first; each is asked only when those before it failed."""
        settings = self._client.settings
        folders = [Path(m) for m in settings.mirrors if "://" not in m]
        if isinstance(pin, WheelPin):
            folders += settings.folders
        found = [partial(_in_folder, folder, pin) for folder in folders]
        if offline:
            return [*found]
        addresses = [m for m in settings.mirrors if "://" in m]
        found_there = [partial(_at_mirror, address, pin) for address in addresses]
        if isinstance(pin, DebPin):
            return [*found, *found_there, partial(self._debian_places, pin)]
        asked = [partial(self._index_places, index, pin) for index in settings.indexes]
        return [*found, *found_there, *asked]

    def _index_places(self, index: str, pin: WheelPin) -> Iterator[Place]:
        page = self._page(index, pin.name)
        if page is None:
            return
        for package in page.packages:
            if package.filename != pin.file:
                continue
            offered = package.digests.get("sha256")
            if offered and offered != pin.sha256:
                raise DigestMismatch(
                    f"{pin.file}: locked as {pin.sha256}, the index offers {offered}"
                )
            yield Place(package.url)

    def _page(self, index: str, project: str) -> ProjectPage | None:
        """A project's page, asked for once even by several threads."""
        key = (index, project)
        with self._guard:
            lock = self._page_locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._pages:
                self._pages[key] = project_page(self._client, index, project)
            return self._pages[key]

    def _debian_places(self, pin: DebPin) -> Iterator[Place]:
        for base in self._find_mirror().bases_for(pin.path):
            yield Place(f"{base.rstrip('/')}/{quote(pin.path, safe='/+~')}")
        if snapshot := os.environ.get("SM120_DEBIAN_SNAPSHOT"):
            yield from snapshot_places(self._client, snapshot, pin)


def _at_mirror(address: str, pin: Pin) -> Iterator[Place]:
    """An extra mirror holds files by name, or by sha256/<hex>."""
    yield Place(f"{address.rstrip('/')}/{quote(pin.file)}")
    yield Place(f"{address.rstrip('/')}/sha256/{pin.sha256}")


def _in_folder(folder: Path, pin: Pin) -> Iterator[Place]:
    by_hash = (folder / pin.sha256, folder / "sha256" / pin.sha256)
    for path in (folder / pin.file, folder / pin.name / pin.file, *by_hash):
        if path.is_file():
            yield Place(str(path), local=True)


def project_page(client: Client, index: str, project: str) -> ProjectPage | None:
    """What an index offers of a project; None where it has no such project."""
    simple = PyPISimple(index, session=client.session)
    reason: object = ""
    for attempt in range(3):
        try:
            return simple.get_project_page(project, timeout=60)
        except NoSuchProjectError:
            return None
        except UnsupportedContentTypeError as error:
            reason = error
            break
        except (RequestException, ValueError) as error:
            reason = error
            client.pause(attempt, None)
    words = " ".join(str(reason).split())[:160]
    raise SourceUnreachable(f"{masked(index)}: no answer about {project} ({words})")


def debian_mirror() -> DebianMirror:
    """SM120_DEBIAN_MIRROR (and _SECURITY), else what apt uses on this machine."""
    if chosen := os.environ.get("SM120_DEBIAN_MIRROR"):
        security = os.environ.get("SM120_DEBIAN_SECURITY_MIRROR", "").split()
        return DebianMirror(main=tuple(chosen.split()), security=tuple(security))
    return find_mirror()


def snapshot_places(client: Client, base: str, pin: DebPin) -> Iterator[Place]:
    """Debian's snapshot archive keeps every version ever published, by SHA-1."""
    version = quote(pin.version.replace("%3a", ":"), safe="")
    try:
        answer = client.session.get(
            f"{base.rstrip('/')}/mr/binary/{pin.name}/{version}/binfiles?fileinfo=1",
            timeout=60,
        )
        found = answer.json()["fileinfo"] if answer.ok else {}
    except (RequestException, ValueError, KeyError):
        return
    for sha1, copies in found.items():
        # epochs are not part of a file's name there, so the size tells the architectures apart
        if any(c.get("size") == pin.size_bytes for c in copies):
            yield Place(f"{base.rstrip('/')}/file/{sha1}")
