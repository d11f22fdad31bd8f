"""Where right bytes may come from when some are wrong: this machine, then the routes of a fetch.

A set of 600 GB takes days to fetch. Before a file is fetched whole, its bytes are looked for where
they may well be: where a link in its place leads, in other files of its size below the same folder,
and in the Hub cache of this user. A copy counts when its hash is right.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.fetch.http import Client
from pipeline.weights.disk.hashing import cores, on_all_cores, read_file
from pipeline.weights.disk.survey import plain_size, walk
from pipeline.weights.model import FILE_HASH, FilePin
from pipeline.weights.place import Place, cache_name, user_cache
from pipeline.weights.transfer.fetch import fetch_files, fetch_range
from pipeline.weights.transfer.router import Route

# Another copy of a set: the bytes of a file from start up to stop, or a `PipelineError`. Nothing of
# it is trusted before the hash is right.
Source = Callable[[FilePin, int, int], Iterator[bytes]]


@dataclass
class RouteSupply:
    """Folders, neighbours and the Hub, as a fetch uses them."""

    routes: list[Route]
    client: Client

    def sources(self) -> list[Source]:
        """Each route by itself: one that has other bytes is passed over for the next."""
        return [partial(fetch_range, [route], client=self.client) for route in self.routes]

    def fetch(self, place: Place, pins: list[FilePin]) -> None:
        """Whole files, several and their ranges in parallel; raises a `PipelineError`."""
        fetch_files(place, pins, self.routes, client=self.client, again=True)

    def hang_up(self) -> None:
        """End all waiting, also for a server's next bytes."""
        self.client.hang_up()


def find_copies(
    place: Place, pins: Sequence[FilePin], judged: Collection[Path], stop: threading.Event
) -> dict[str, Path]:
    """By the wanted hash, a file that has it. What `judged` files hold is known already."""
    wanted = {pin.want for pin in pins}
    sizes = {pin.size_bytes for pin in pins} - {0}  # an empty file needs no copy
    by_size: dict[int, list[Path]] = {}
    # what is half fetched or half repaired is no copy
    unfinished = place.partial_folder.relative_to(place.root).as_posix()
    for path in (place.root / name for name in walk(place.root, [unfinished])):
        # a blob's name is its hash, so one with another name need not be read
        is_blob = path.parent.name == "blobs" and FILE_HASH.fullmatch(path.name)
        if path in judged or (is_blob and path.name not in wanted):
            continue
        with suppress(OSError):
            if (size := path.lstat().st_size) in sizes:
                by_size.setdefault(size, []).append(path)
    twins: dict[str, list[Path]] = {}  # two names of one content
    for pin in place.lock.files:
        twins.setdefault(pin.want, []).append(place.file(pin))
    candidates: dict[tuple[Path, bool], FilePin] = {}
    for pin in pins:
        own = place.file(pin)
        # where links in the file's place lead, and this user's Hub cache
        real = [(path, Path(os.path.realpath(path))) for path in (own, place.name(pin))]
        paths = [target for path, target in real if target != path.absolute()]
        paths.append(user_cache() / cache_name(place.lock) / "blobs" / pin.want)
        # such as the tokenizer that a repository also keeps in a sub-folder
        paths += [path for path in twins[pin.want] if path != own]
        for path in (*paths, *by_size.get(pin.size_bytes, [])):
            if plain_size(path) == pin.size_bytes:
                # the same file may be wanted by SHA-256 and, under another name, by git's hash
                candidates[path, pin.sha256 is None] = pin
    by_digest: dict[str, Path] = {}

    def check(item: tuple[Path, FilePin]) -> None:
        with suppress(OSError):
            by_digest[read_file(item[0], item[1].new_hash(), stop=stop).digest] = item[0]

    on_all_cores(check, [(path, pin) for (path, _), pin in candidates.items()], cores(), stop.set)
    return {digest: path for digest, path in by_digest.items() if digest in wanted}
