"""Which routes lead to a locked set on this machine: folders, then neighbours, then the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import SpecInvalid
from pipeline.fetch.http import Client
from pipeline.fetch.settings import folder_of, plain_settings
from pipeline.net.address import masked, parts_of
from pipeline.net.failures import BadAddress
from pipeline.weights import hub
from pipeline.weights.model import FilePin, WeightsLock
from pipeline.weights.place import cache_name
from pipeline.weights.transfer.hub_routes import (
    STALL_S,
    HttpRoute,
    HubRepository,
    XetRoute,
    has_xet,
)
from pipeline.weights.transfer.router import (
    NEIGHBOUR_TOKEN,
    AttemptFailed,
    ByteStream,
    NotAvailable,
    Route,
    not_offline,
)


def open_routes(
    lock: WeightsLock, *, neighbours: Sequence[str] = (), offline: bool = False
) -> tuple[Client, list[Route]]:
    """The routes that this machine's environment gives, and the client that they share."""
    # not pip's settings: its indexes and logins have nothing to do with weights
    client, is_offline = Client(plain_settings()), offline or hub.is_offline()
    routes = find_routes(
        client,
        lock,
        endpoint=hub.endpoint(),
        token=None if is_offline else hub.saved_token(),
        neighbours=neighbours,
        offline=is_offline,
        with_xet=hub.may_use_xet(),
    )
    return client, routes


def find_routes(
    client: Client,
    lock: WeightsLock,
    *,
    endpoint: str,
    token: str | None,
    neighbours: Sequence[str] = (),
    offline: bool = False,
    stall_s: float = STALL_S,
    with_xet: bool = True,
) -> list[Route]:
    """Folders, then neighbours, then the Hub: by plain HTTP, and by Xet where that stalls.

    The Hub's token is sent to the Hub only; neighbours get the one in SM120_NEIGHBOUR_TOKEN.
    """
    # all that are named share the work; the internet is asked for what none of them has
    routes: list[Route] = [FolderRoute(folder, lock) for folder in named_folders(neighbours)]
    if offline:
        return routes
    for address in (place for place in neighbours if folder_of(place) is None):
        try:
            name = parts_of(address).netloc.rpartition("@")[2]
        except BadAddress as error:
            raise SpecInvalid(
                f"--from {masked(address)}: is neither a folder nor an http address",
                "Name a folder, or http://HOST:PORT of a neighbour.",
            ) from error
        # not an option: command lines are visible to every user of the machine
        secret = os.environ.get(NEIGHBOUR_TOKEN)
        there = HubRepository(address.rstrip("/"), lock.repository, lock.commit, secret)
        routes.append(HttpRoute(client, there, name, stall_s, is_shared=True))
    home = HubRepository(endpoint, lock.repository, lock.commit, token)
    routes.append(HttpRoute(client, home, "plain HTTP", stall_s))
    # after plain HTTP, which needs no native code and shares one connection pool
    if with_xet and has_xet():
        routes.append(XetRoute(client, home, stall_s))
    return routes


def named_folders(neighbours: Sequence[str]) -> list[Path]:
    """The folders among the sources that a user named."""
    folders = [f for place in neighbours if (f := folder_of(place))]
    if missing := [f for f in folders if not f.is_dir()]:
        raise SpecInvalid(f"--from {missing[0]}: is not a folder", "Name a folder or an address.")
    return folders


class FolderRoute:
    """A folder that may hold the files: by their paths, or as the Hub's cache does."""

    is_shared = True

    def __init__(self, folder: Path, lock: WeightsLock) -> None:
        self.name = str(folder)
        self._roots = (folder, folder / "snapshots" / lock.commit)
        self._blobs = (folder / "blobs", folder / cache_name(lock) / "blobs")

    def open(self, pin: FilePin, start: int, stop: int) -> ByteStream:
        for path in (*(r / pin.path for r in self._roots), *(b / pin.want for b in self._blobs)):
            try:
                # the size rules out most other files; the hash of what was copied decides
                if path.is_file() and path.stat().st_size == pin.size_bytes:
                    return _FileBody(path.open("rb"), start, stop)
            except OSError:
                continue
        raise NotAvailable(not_offline(f"{pin.path}: is not in {self.name}"), only_this_file=True)


class _FileBody:
    is_whole = False

    def __init__(self, handle: BinaryIO, start: int, stop: int) -> None:
        self._handle, self._rest = handle, stop - start
        handle.seek(start)

    def readinto(self, buffer: memoryview) -> int:
        try:
            count: int = self._handle.readinto(buffer[: self._rest])  # type: ignore[attr-defined]
        except OSError as error:
            raise AttemptFailed(f"{self._handle.name}: {error.strerror}") from error
        if not count:
            raise AttemptFailed(f"{self._handle.name}: became shorter")
        self._rest -= count
        return count

    def close(self) -> None:
        self._handle.close()
