"""Uploads missing blobs: mounts them where possible, and resumes after a break."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pipeline.artifacts.registry.client import (
    MOST_ANSWER_BYTES,
    Refusal,
    RegistryRequest,
    location_of,
)
from pipeline.artifacts.registry.repository import Repository
from pipeline.core import errors
from pipeline.core.files import sha256_of_file
from pipeline.core.log import Bar, Gauge
from pipeline.core.model import sha256_of
from pipeline.core.net import timing
from pipeline.core.net.client import Reply
from pipeline.core.net.failures import Lost

# What is sent in one request; smaller blobs go in one go, which spares the registry a sync to disk.
# Where a proxy finds that too much, it is cut into the smaller size.
CHUNK_BYTES = 256 << 20
SMALL_CHUNK_BYTES = 32 << 20
# a registry that forgets sessions (several replicas without shared state) forgets them all
_MOST_SESSIONS = 5
# small enough that Ctrl-C is noticed while a slow connection takes one piece
_PIECE_BYTES = 1 << 18
# the specification writes `0-9`, some registries `bytes=0-9`
_RANGE = re.compile(r"(?:bytes=)?0-(\d{1,18})")

BlobResult = Literal["there", "mounted", "sent"]


@dataclass(frozen=True)
class LocalBlob:
    """Bytes that we have, as a file or in memory."""

    digest: str
    size_bytes: int
    path: Path | None = None
    data: bytes = b""
    part: str = "a blob"  # what it is in its image

    def pieces(self, start: int, length: int) -> Iterator[bytes]:
        """Some of the bytes; a file that became shorter is an error, not an upload."""
        if self.path is None:
            yield self.data[start : start + length]
            return
        with self.path.open("rb") as handle:
            handle.seek(start)
            while length > 0:
                piece = handle.read(min(_PIECE_BYTES, length))
                if not piece:
                    fault = f"{self.path} is shorter than {self.size_bytes} bytes"
                    raise errors.StoreDamaged(f"{self.part} is damaged: {fault}")
                length -= len(piece)
                yield piece

    def require_whole(self) -> None:
        """Hashes the bytes again when a registry reports another digest."""
        got = sha256_of_file(self.path) if self.path else sha256_of(self.data)
        if got != self.digest:
            raise errors.StoreDamaged(
                f"{self.part} is damaged: {self.path} does not match its digest"
            )


@dataclass
class _Chunk:
    """A stretch of a blob as the body of a request."""

    stop: threading.Event
    blob: LocalBlob
    start: int
    size_bytes: int
    gauge: Gauge

    def pieces(self) -> Iterator[bytes]:
        at = self.start
        for piece in self.blob.pieces(self.start, self.size_bytes):
            if self.stop.is_set():
                raise errors.Interrupted("stopped")
            yield piece
            at += len(piece)
            self.gauge.at(at)


def push_blob(
    repository: Repository, blob: LocalBlob, bar: Bar, mount_from: str = ""
) -> BlobResult:
    """Brings a missing blob, if possible from another repository of the registry."""
    gauge = Gauge(bar)
    try:
        location = _begin(repository, blob, mount_from)
    except (errors.RegistryRefused, Refusal):
        if not mount_from:
            raise
        # we may not be allowed to read the other repository: then the blob is sent
        location = _begin(repository, blob)
    if location is not None:
        _Upload(repository, blob, gauge).run(location)
    gauge.at(blob.size_bytes)
    return "mounted" if location is None else "sent"


def _begin(repository: Repository, blob: LocalBlob, mount_from: str = "") -> str | None:
    """Begins an upload; returns its address, or none where the registry mounted the blob."""
    query = f"?mount={quote(blob.digest)}&from={quote(mount_from, safe='')}" if mount_from else ""
    place, scope = f"{repository.path}/blobs/uploads/", repository.may("pull,push", mount_from)
    good = (201, 202) if mount_from else (202,)
    answer = repository.client.ask(RegistryRequest("POST", place + query, scope, good))
    return None if answer.status == 201 else location_of(answer)


class _Upload:
    """One blob's progress through one or more upload sessions."""

    def __init__(self, repository: Repository, blob: LocalBlob, gauge: Gauge) -> None:
        self._repository, self._client = repository, repository.client
        self._scope = repository.may("pull,push")
        self._blob, self._gauge = blob, gauge
        self._offset, self._place = 0, ""
        self._chunk_bytes = CHUNK_BYTES
        self._in_one = blob.size_bytes <= CHUNK_BYTES

    def run(self, location: str) -> None:
        """Sends until the registry has it; resumes after a cut, restarts a lost session."""
        # failures in a row without progress; a slow link may break any number of times
        failures, sessions, self._place = 0, 1, location
        while True:
            before = self._offset
            try:
                return self._send()
            except Lost as lost:
                failures = 1 if self._offset > before else failures + 1
                if failures == timing.ATTEMPTS:
                    raise errors.RegistryUnreachable(f"{self._repository}: {lost}") from lost
                self._client.retry_policy.pause(failures - 1, lost)
            # the closing request may have arrived and only its answer been lost
            if self._repository.has_blob(self._blob.digest, self._blob.size_bytes):
                return
            if not self._resume():
                sessions += 1
                if sessions > _MOST_SESSIONS:
                    raise errors.RegistryUnreachable(
                        f"{self._repository}: lost every upload session"
                    )
                self._offset = 0
                self._place = _begin(self._repository, self._blob) or ""
            self._gauge.at(self._offset)

    def _send(self) -> None:
        """Sends all chunks, then the closing request, which carries a small blob whole."""
        blob, repository = self._blob, self._repository
        while self._offset < blob.size_bytes and not (self._in_one and not self._offset):
            length, before = min(self._chunk_bytes, blob.size_bytes - self._offset), self._offset
            span = {"Content-Range": f"{before}-{before + length - 1}"}
            answer = self._request("PATCH", self._place, 202, length, span)
            self._place = location_of(answer)
            self._offset = self._confirmed(answer, before + length)
            if self._offset <= before:
                raise Lost(f"{repository}: accepted {length} bytes and kept none")
        # registries keep the session's state in the query
        place = f"{self._place}{'&' if '?' in self._place else '?'}digest={blob.digest}"
        answer = self._request("PUT", place, 201, blob.size_bytes - self._offset, {})
        claimed = answer.header("Docker-Content-Digest")
        if claimed and claimed != blob.digest:
            raise errors.RegistryBroken(f"{repository}: received {blob.digest} as {claimed}")

    def _request(
        self, method: str, place: str, good: int, length: int, more: dict[str, str]
    ) -> Reply:
        part = _Chunk(self._client.stop, self._blob, self._offset, length, self._gauge)
        headers = {"Content-Type": "application/octet-stream", **more}
        try:
            request = RegistryRequest(method, place, self._scope, (good,), headers, part)
            return self._client.read(self._client.once(request), MOST_ANSWER_BYTES)
        # the session expired: not an error of the blob, the upload starts again
        except errors.NotInRegistry as gone:
            raise Lost(f"the upload is gone: {gone}") from gone
        except Refusal as refused:
            # the registry and we disagree about the offset: `_resume` asks for it
            if refused.status == 416:
                raise Lost(str(refused)) from refused
            # a proxy in front of the registry limits the body, often nginx with its default
            if refused.status == 413 and self._chunk_bytes > SMALL_CHUNK_BYTES:
                self._chunk_bytes = SMALL_CHUNK_BYTES
                self._in_one, self._offset, self._place = False, 0, ""
                raise Lost(f"{self._repository}: accepts only smaller chunks") from refused
            # some registries know no chunked uploads: everything goes with the closing PUT
            if method == "PATCH" and refused.status in (400, 405, 411, 501) and not self._in_one:
                self._in_one, self._offset, self._place = True, 0, ""
                raise Lost(f"{self._repository}: accepts no chunks") from refused
            # either the transfer or our own disk changed a byte: find out which
            if "DIGEST_INVALID" in refused.codes:
                self._blob.require_whole()
            raise

    def _resume(self) -> bool:
        """Asks how far the session is; false where it is lost."""
        if not self._place:
            return False
        good = (204, 200, 202, 404, 400)
        try:
            answer = self._client.ask(RegistryRequest("GET", self._place, self._scope, good))
        except errors.RegistryBroken:
            return False
        if answer.status in (404, 400):
            return False
        self._offset = self._confirmed(answer, self._blob.size_bytes)
        if answer.header("Location"):
            self._place = location_of(answer)
        # nothing, or one byte: registries report both as 0-0
        return self._offset > 0

    def _confirmed(self, answer: Reply, most: int) -> int:
        """The bytes that the registry confirms; it cannot have more than were sent."""
        span = _RANGE.fullmatch(answer.header("Range").strip())
        count = int(span[1]) + 1 if span and span[1] != "0" else 0
        if not span:
            count = most if answer.status == 202 else 0
        if count > most:
            raise errors.RegistryBroken(f"{self._repository}: claims {count} bytes of {most} sent")
        return count
