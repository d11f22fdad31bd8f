"""Locked files into the store: in parallel, resumable, checked on arrival or not kept."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from pipeline.errors import (
    DigestMismatch,
    MirrorUnknown,
    OfflineMiss,
    PipelineError,
    SourceUnreachable,
)
from pipeline.fetch.http import Client, download
from pipeline.fetch.sources import Place, Sources
from pipeline.files import os_errors_explained
from pipeline.lock.model import Pin
from pipeline.log import Bar
from pipeline.store.store import Store

WORKERS = 6


def has_input(store: Store, pin: Pin) -> bool:
    """Whether the store holds the file; its name is its hash, its size is checked."""
    try:
        return store.input_path(pin.sha256).stat().st_size == pin.size_bytes
    except FileNotFoundError:
        return False


class Fetcher:
    """Brings pins into the store from wherever this machine may ask."""

    def __init__(self, store: Store, client: Client, sources: Sources, *, offline: bool) -> None:
        self._store, self._client, self._sources = store, client, sources
        self._offline = offline

    def fetch(self, pin: Pin, bar: Bar) -> Path:
        """One file, downloaded once even if two processes want it."""
        final = self._store.input_path(pin.sha256)
        with self._store.locked(f"input-{pin.sha256}"):
            if has_input(self._store, pin):
                bar.advance(pin.size_bytes)
                return final
            self._try_all(pin, bar)
            with os_errors_explained(final):
                os.replace(self._store.partial_path(pin.sha256), final)
        return final

    def fetch_all(self, pins: Sequence[Pin], bar: Bar) -> Iterator[tuple[Pin, Path]]:
        """Yield each file as it is done, largest first so that no core waits at the end."""
        todo = sorted(pins, key=lambda p: -p.size_bytes)
        pool = ThreadPoolExecutor(WORKERS)
        running: dict[Future[Path], Pin] = {}
        try:
            running = {pool.submit(self.fetch, pin, bar): pin for pin in todo}
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            self._client.stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._client.stop.clear()

    def _try_all(self, pin: Pin, bar: Bar) -> None:
        """Take the first place that delivers; remember why the others did not."""
        failures: list[PipelineError] = []
        for find in self._sources.finders(pin, offline=self._offline):
            try:
                for place in find():
                    try:
                        return self._take(pin, place, bar)
                    except (SourceUnreachable, DigestMismatch) as error:
                        failures.append(error)
            except (SourceUnreachable, DigestMismatch, MirrorUnknown) as error:
                failures.append(error)
        raise self._verdict(pin, failures)

    def _verdict(self, pin: Pin, failures: list[PipelineError]) -> PipelineError:
        """The most telling of several failures."""
        wrong = [f for f in failures if isinstance(f, DigestMismatch)]
        if wrong:
            return wrong[0]
        if self._offline:
            return OfflineMiss(f"{pin.file}: not in the store")
        if len(failures) == 1:
            return failures[0]
        reasons = "; ".join(str(f) for f in failures) or "no source has it"
        return SourceUnreachable(f"{pin.file}: {reasons}")

    def _take(self, pin: Pin, place: Place, bar: Bar) -> None:
        partial = self._store.partial_path(pin.sha256)
        if place.local:
            _copy(pin, Path(place.where), partial, bar)
        else:
            download(
                self._client,
                place.where,
                partial,
                sha256=pin.sha256,
                size_bytes=pin.size_bytes,
                bar=bar,
            )


def _copy(pin: Pin, source: Path, partial: Path, bar: Bar) -> None:
    """From a folder: copied, then judged like any download."""
    with os_errors_explained(partial):
        shutil.copyfile(source, partial)
    with partial.open("rb") as handle:
        got = hashlib.file_digest(handle, "sha256").hexdigest()
    if got != pin.sha256:
        partial.unlink()
        raise DigestMismatch(f"{source}: locked as {pin.sha256}, it holds {got}")
    bar.advance(pin.size_bytes)
