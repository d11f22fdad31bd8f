"""Brings locked files into the store: in parallel, resumable, checked on arrival or not kept.

It hashes what is there already before a build uses it: a store can come from a backup or a CI
cache, and a file that was put there has the right name and size, too. That costs a second for a
gigabyte, and finds any change made before the build began. It is no defence against a program that
writes to the store while it is built from.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.errors import SourceUnreachable
from pipeline.core.files import (
    is_whole,
    keep_file,
    link_or_copy,
    need_space_for_copies,
    os_errors_explained,
    size_so_far,
)
from pipeline.core.log import Bar, Gauge
from pipeline.core.net.http import NetClient, download_file
from pipeline.core.net.settings import (
    default_index,
    local_folder,
    read_settings,
    with_login,
)
from pipeline.images.fetch.base import Bases
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.fetch.sources import Place, Sources, debian_mirror, read_below
from pipeline.images.lock.make import Transport
from pipeline.images.lock.model import BasePin, DebPin, Pin

# Large files keep the line busy, small ones wait for answers: some threads begin at each end.
LARGE_FIRST, SMALL_FIRST = 4, 6
_CHUNK_BYTES = 1 << 20  # between two looks for Ctrl-C
# Failures of one place after which the next one is asked.
_ELSEWHERE = (errors.SourceUnreachable, errors.DigestMismatch)

Result = tuple[Pin, Path | Exception]


class Fetcher:
    """Brings pins into the store from wherever this machine may ask."""

    def __init__(
        self,
        store: Store,
        client: NetClient,
        sources: Sources,
        *,
        offline: bool,
        bases: BaseSettings | None = None,
    ) -> None:
        self._store, self._client, self._sources = store, client, sources
        self.offline = offline
        folders = tuple(f for m in client.settings.mirrors if (f := local_folder(m)))
        chosen = bases or BaseSettings()
        chosen = replace(chosen, folders=(*folders, *chosen.folders))
        self.bases = Bases(store, chosen, offline=offline)

    def fetch(self, pin: Pin, bar: Bar) -> Path:
        """Fetches one file, once even if two processes want it."""
        final = self._store.input_path(pin.sha256)
        # by content, not by image: two builds often want the same wheel at the same time
        with self._store.locked(f"input-{pin.sha256}", self._client.stop):
            if self._store.has_input(pin.sha256, pin.size_bytes):
                gauge = Gauge(bar)
                with final.open("rb") as handle:
                    if _hashed(handle, gauge, self._client.stop) == pin.sha256:
                        return final
                gauge.at(0)
                log.say(f"{pin.file}: the store's copy is not the locked file and is removed")
                final.unlink(missing_ok=True)
            partial, failures = self._store.partial_path(pin.sha256), list[errors.PipelineError]()

            def take(place: Place) -> None:
                gauge = Gauge(bar)
                sha, size = pin.sha256, pin.size_bytes
                try:
                    if isinstance(place, Path):
                        _copy(pin, place, partial, gauge, self._client.stop)
                    else:
                        download_file(
                            self._client, place, partial, sha256=sha, size_bytes=size, bar=gauge
                        )
                except BaseException:
                    gauge.at(0)
                    raise

            # the first place that delivers; the reasons of those before it are kept
            for places in self._sources.finders(pin, offline=self.offline):
                try:
                    for place in places:
                        try:
                            take(place)
                            keep_file(partial, final)
                            return final
                        except _ELSEWHERE as error:
                            failures.append(error)
                except (*_ELSEWHERE, errors.MirrorUnknown) as error:
                    failures.append(error)
            raise self._verdict(pin, failures)

    def fetch_all(self, pins: Sequence[Pin], bar: Bar) -> Generator[tuple[Pin, Path]]:
        """Yield each file as it is done.

        Use it under `contextlib.closing`, so that its threads end when the caller does.
        """
        missing = [
            pin
            for pin in (pins if self.offline else ())
            if not self._store.has_input(pin.sha256, pin.size_bytes)
            and not any(True for places in self._sources.finders(pin, offline=True) for _ in places)
        ]
        if len(missing) == 1:
            raise self._verdict(missing[0], [])
        # says at once how much is missing, not only the first file
        if missing:
            largest = max(missing, key=lambda pin: pin.size_bytes)
            files = log.count(len(missing), "file is", "files are")
            raise errors.OfflineMiss(f"{files} not in the store, such as {largest.file}")
        # a deque's ends may be taken from by several threads without a lock
        todo = deque(sorted(pins, key=lambda p: p.size_bytes))
        done: SimpleQueue[Result] = SimpleQueue()

        def work(take: Callable[[], Pin]) -> None:
            while not self._client.stop.is_set():
                try:
                    pin = take()
                except IndexError:
                    return
                try:
                    done.put((pin, self.fetch(pin, bar)))
                except Exception as error:
                    # also a defect of ours: without it the other end would wait for ever
                    done.put((pin, error))

        takers = [todo.pop] * LARGE_FIRST + [todo.popleft] * SMALL_FIRST
        threads = [
            threading.Thread(target=work, args=(take,), daemon=True) for take in takers[: len(pins)]
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in pins:
                pin, got = done.get()
                if isinstance(got, Exception):
                    raise got
                yield pin, got
        finally:
            # threads wait in recv(); closing their sockets is the only way to end them
            self._client.hang_up()
            self._client.join(threads)

    def _verdict(self, pin: Pin, failures: list[errors.PipelineError]) -> errors.PipelineError:
        """The most telling of several failures."""
        # that a source has other bytes matters more than that the next one does not answer
        wrong = [f for f in failures if isinstance(f, errors.DigestMismatch)]
        if wrong:
            return wrong[0]
        if self.offline:
            return errors.OfflineMiss(f"{pin.file}: not in the store")
        if len(failures) == 1:
            return failures[0]
        reasons = "; ".join(str(f) for f in failures) or "no source has it"
        return errors.SourceUnreachable(f"{pin.file}: {reasons}")


def _copy(pin: Pin, source: Path, partial: Path, bar: Bar, stop: threading.Event) -> None:
    """Copies a file from a folder, and judges it like any download."""
    try:
        with source.open("rb") as handle:
            # of the open file: what lies under the name may change
            if os.fstat(handle.fileno()).st_size != pin.size_bytes:
                raise errors.DigestMismatch(
                    f"{source}: is not of the locked {pin.size_bytes} bytes"
                )
            with os_errors_explained(partial), partial.open("wb") as out:
                got = _hashed(handle, bar, stop, out)
    except OSError as error:
        raise errors.SourceUnreachable(f"{source}: {error.strerror}") from error
    if got != pin.sha256:
        partial.unlink()
        raise errors.DigestMismatch(f"{source}: locked as {pin.sha256}, it holds {got}")


def _hashed(source: BinaryIO, bar: Bar, stop: threading.Event, out: BinaryIO | None = None) -> str:
    sha = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        if stop.is_set():
            raise errors.Interrupted("stopped")
        if out is not None:
            out.write(chunk)
        sha.update(chunk)
        bar.advance(len(chunk))
    return sha.hexdigest()


def collect(
    store: Store,
    fetcher: Fetcher,
    pins: Sequence[Pin],
    folder: Path,
    *,
    as_archive: bool = False,
) -> int:
    """Fetch all pins and put them into `folder` under their own names; returns the bytes.

    `as_archive`: each .deb under its path below a mirror, where apt looks for it.
    """

    def name_of(pin: Pin) -> str:
        return pin.path if as_archive and isinstance(pin, DebPin) else pin.file

    with os_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    todo = [
        p for p in pins if not is_whole(folder / name_of(p), f"sha256:{p.sha256}", p.size_bytes)
    ]
    total = sum(p.size_bytes for p in todo)
    absent = [p for p in todo if not store.has_input(p.sha256, p.size_bytes)]
    begun = [size_so_far(store.partial_path(p.sha256)) for p in absent]
    store.need_space(sum(max(0, p.size_bytes - n) for p, n in zip(absent, begun, strict=True)))
    need_space_for_copies(store.root, folder, total)
    title = f"Collecting {log.count(len(todo), 'file')}, {log.size(total)}"
    with (
        log.step(title),
        log.progress("fetched", total) as bar,
        closing(fetcher.fetch_all(todo, bar)) as arrivals,
    ):
        for pin, path in arrivals:
            with os_errors_explained(folder):
                (folder / name_of(pin)).parent.mkdir(parents=True, exist_ok=True)
                _place(path, folder / name_of(pin))
    return sum(p.size_bytes for p in pins)


def collect_base(store: Store, fetcher: Fetcher, pin: BasePin, folder: Path) -> list[int]:
    """Collects a foreign base's documents and layers by their hashes; returns the bytes of each."""
    place = folder / "sha256"
    sizes = {x.digest: x.size_bytes for x in (*pin.documents, *pin.blobs)}
    need_space_for_copies(store.root, folder, sum(sizes.values()))
    fetcher.bases.bring(pin)
    with os_errors_explained(folder):
        place.mkdir(parents=True, exist_ok=True)
        for digest in sizes:
            _place(store.blob_path(digest), place / digest.removeprefix("sha256:"))
    return list(sizes.values())


def _place(source: Path, target: Path) -> None:
    """Links a file where the disk allows it; else copies it, and names only a whole copy."""
    if target.is_dir():
        raise errors.StoreUnwritable(f"{target}: is a folder", "Move it, or name another folder.")
    # beside the target, so that the rename stays on one disk
    partial = target.with_name(f".{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        link_or_copy(source, partial)
        os.replace(partial, target)
    except BaseException:
        # a disk that is full, or Ctrl-C in the middle of a copy
        partial.unlink(missing_ok=True)
        raise


def make_fetcher(
    store: Store, mirrors: tuple[str, ...], offline: bool, bases: BaseSettings | None = None
) -> Fetcher:
    """A fetcher over everything that this machine is configured with."""
    client = NetClient(read_settings(mirrors))
    return Fetcher(store, client, Sources(client), offline=offline, bases=bases)


def make_transport() -> Transport:
    """How a lock reaches the configured index and mirror."""
    from pipeline.images.fetch.index import find_file  # slow to import, and only a new lock asks

    settings = read_settings()
    client = NetClient(settings)

    def debian(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().main, path, most_bytes)

    def security(path: str, most_bytes: int) -> bytes:
        return read_below(client, debian_mirror().security, path, most_bytes)

    def size_of(project: str, filename: str, sha256: str) -> int:
        # the lock holds sizes, so that a plan can say what a build will fetch
        for folder in settings.folders:
            if (folder / filename).is_file():
                return (folder / filename).stat().st_size
        for index in settings.indexes:
            for package in find_file(client, index, project, filename):
                if package.digests.get("sha256") == sha256:
                    # some indexes give no size, but the file's own server does
                    return package.size or client.size_of(with_login(package.url, index))
        raise SourceUnreachable(f"{filename}: resolved, but no index lists it")

    # uv's variables: arguments, with a password, would be open to all users
    env = {}
    if settings.indexes and settings.indexes[0] != default_index():
        env["UV_DEFAULT_INDEX"] = settings.indexes[0]
    if settings.indexes[1:]:
        env["UV_INDEX"] = " ".join(settings.indexes[1:])
    if folders := [str(f) for f in settings.folders if f.is_dir()]:
        env["UV_FIND_LINKS"] = ",".join(folders)
    if settings.ca_file:
        env["SSL_CERT_FILE"] = settings.ca_file
    if settings.proxy:
        env |= {"HTTP_PROXY": settings.proxy, "HTTPS_PROXY": settings.proxy}
    # without an index at all, uv would ask the default one
    args = [] if settings.indexes else ["--no-index"]
    return Transport(debian, security, size_of, args, env)
