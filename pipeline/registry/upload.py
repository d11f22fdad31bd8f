"""Blobs to a registry: asked for first, mounted where possible, resumed after a break."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from pipeline.errors import (
    Interrupted,
    NotInRegistry,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
    StoreDamaged,
)
from pipeline.log import Bar, Gauge
from pipeline.net import timing
from pipeline.net.client import Reply
from pipeline.net.failures import Lost
from pipeline.registry.client import MOST_ANSWER_BYTES, Refusal, location_of
from pipeline.registry.repository import Repository

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

Way = Literal["there", "mounted", "sent"]


@dataclass(frozen=True)
class LocalBlob:
    """Bytes that we have, as a file or in memory."""

    digest: str
    size_bytes: int
    path: Path | None = None
    data: bytes = b""
    part: str = "a blob"  # what it is in its image

    def pieces(self, start: int, length: int) -> Iterator[bytes]:
        """Some of the bytes; a file that changed under us is an error, not an upload."""
        if self.path is None:
            yield self.data[start : start + length]
            return
        with self.path.open("rb") as handle:
            handle.seek(start)
            while length > 0:
                piece = handle.read(min(_PIECE_BYTES, length))
                if not piece:
                    raise self._damaged(f"is shorter than {self.size_bytes} bytes")
                length -= len(piece)
                yield piece

    def require_whole(self) -> None:
        """Hash the bytes again when a registry reports another digest."""
        sha = hashlib.sha256()
        for piece in self.pieces(0, self.size_bytes):
            sha.update(piece)
        if f"sha256:{sha.hexdigest()}" != self.digest:
            raise self._damaged("does not match its digest")

    def _damaged(self, difference: str) -> StoreDamaged:
        return StoreDamaged(f"{self.part} is damaged: {self.path} {difference}")


class _Chunk:
    """A stretch of a blob as the body of a request."""

    def __init__(
        self, repository: Repository, blob: LocalBlob, start: int, size: int, gauge: Gauge
    ) -> None:
        self._stop = repository.client.stop
        self._blob, self._start, self._gauge = blob, start, gauge
        self.size_bytes = size

    def pieces(self) -> Iterator[bytes]:
        at = self._start
        for piece in self._blob.pieces(self._start, self.size_bytes):
            if self._stop.is_set():
                raise Interrupted("stopped")
            yield piece
            at += len(piece)
            self._gauge.at(at)


def push_blob(repository: Repository, blob: LocalBlob, bar: Bar, mount_from: str = "") -> Way:
    """Bring a blob that is missing there, from another repository of the registry if it can."""
    gauge = Gauge(bar)
    try:
        location = _begin(repository, blob, mount_from)
    except (RegistryRefused, Refusal):
        if not mount_from:
            raise
        # we may not be allowed to read the other repository: then the blob is sent
        location = _begin(repository, blob)
    if location is None:
        gauge.at(blob.size_bytes)
        return "mounted"
    _Upload(repository, blob, gauge).run(location)
    gauge.at(blob.size_bytes)
    return "sent"


def _begin(repository: Repository, blob: LocalBlob, mount_from: str = "") -> str | None:
    """The address of a new upload; none where the registry took the blob from elsewhere."""
    query = f"?mount={quote(blob.digest)}&from={quote(mount_from, safe='')}" if mount_from else ""
    answer = repository.client.ask(
        "POST",
        f"{repository.path}/blobs/uploads/{query}",
        scope=repository.may("pull,push", mount_from),
        good=(201, 202) if mount_from else (202,),
    )
    return None if answer.status == 201 else location_of(answer)


class _Upload:
    """One blob's way through one or more upload sessions."""

    def __init__(self, repository: Repository, blob: LocalBlob, gauge: Gauge) -> None:
        self._repository, self._client = repository, repository.client
        self._blob, self._gauge = blob, gauge
        self._offset = 0
        self._chunk_bytes = CHUNK_BYTES
        self._in_one = blob.size_bytes <= CHUNK_BYTES

    def run(self, location: str) -> None:
        """Send until the registry has it; a cut goes on, a lost session begins again."""
        # failures in a row without progress; a slow link may break any number of times
        failures, sessions, place = 0, 1, location
        while True:
            before = self._offset
            try:
                return self._finish(self._send_rest(place))
            except Lost as lost:
                failures = 1 if self._offset > before else failures + 1
                if failures == timing.ATTEMPTS:
                    raise RegistryUnreachable(f"{self._repository}: {lost}") from lost
                self._client.patience.pause(failures - 1, lost)
            resumed = self._where_it_stands()
            if resumed == "there":
                return
            if resumed is None:
                sessions += 1
                if sessions > _MOST_SESSIONS:
                    raise RegistryUnreachable(f"{self._repository}: lost every upload session")
                self._offset = 0
                resumed = _begin(self._repository, self._blob) or ""
            place = resumed
            self._gauge.at(self._offset)

    def _send_rest(self, place: str) -> str:
        """All chunks but the closing request; small blobs go with that one."""
        self._place = place
        while self._offset < self._blob.size_bytes and not (self._in_one and not self._offset):
            length = min(self._chunk_bytes, self._blob.size_bytes - self._offset)
            last = self._offset + length - 1
            answer = self._request(
                "PATCH", self._place, (202,), length, {"Content-Range": f"{self._offset}-{last}"}
            )
            self._place, before = location_of(answer), self._offset
            self._offset = self._confirmed(answer, before + length)
            if self._offset <= before:
                raise Lost(f"{self._repository}: accepted {length} bytes and kept none")
        return self._place

    def _finish(self, place: str) -> None:
        # registries keep the session's state in the query
        joint = "&" if "?" in place else "?"
        length = self._blob.size_bytes - self._offset
        answer = self._request("PUT", f"{place}{joint}digest={self._blob.digest}", (201,), length)
        claimed = answer.header("Docker-Content-Digest")
        if claimed and claimed != self._blob.digest:
            raise RegistryBroken(f"{self._repository}: received {self._blob.digest} as {claimed}")

    def _request(
        self,
        method: str,
        place: str,
        good: tuple[int, ...],
        length: int,
        more: dict[str, str] | None = None,
    ) -> Reply:
        part = _Chunk(self._repository, self._blob, self._offset, length, self._gauge)
        headers = {"Content-Type": "application/octet-stream", **(more or {})}
        try:
            answer = self._client.once(
                method,
                place,
                scope=self._repository.may("pull,push"),
                good=good,
                headers=headers,
                body=part,
            )
            return self._client.read(answer, MOST_ANSWER_BYTES)
        # the session expired: not an error of the blob, the upload starts again
        except NotInRegistry as gone:
            raise Lost(f"the upload is gone: {gone}") from gone
        except Refusal as refused:
            raise self._judged(method, refused) from refused

    def _judged(self, method: str, refused: Refusal) -> Exception:
        """A refusal of some bytes is asked about, of all chunks is obeyed, of the hash is final."""
        # the registry and we disagree about the offset: ask it where it stands
        if refused.status == 416:
            return Lost(str(refused))
        # a proxy in front of the registry limits the body, often nginx with its default
        if refused.status == 413 and self._chunk_bytes > SMALL_CHUNK_BYTES:
            self._chunk_bytes = SMALL_CHUNK_BYTES
            self._in_one, self._offset, self._place = False, 0, ""
            return Lost(f"{self._repository}: accepts only smaller chunks")
        # some registries know no chunked uploads: everything goes with the closing PUT
        if method == "PATCH" and refused.status in (400, 405, 411, 501) and not self._in_one:
            self._in_one, self._offset, self._place = True, 0, ""
            return Lost(f"{self._repository}: accepts no chunks")
        # either the transfer or our own disk changed a byte: find out which
        if "DIGEST_INVALID" in refused.codes:
            self._blob.require_whole()
        return refused

    def _where_it_stands(self) -> str | None:
        """`there`, the address to go on at, or none where the session is lost."""
        # the closing request may have arrived and only its answer been lost
        if self._repository.has_blob(self._blob.digest, self._blob.size_bytes):
            return "there"
        if not self._place:
            return None
        try:
            answer = self._client.ask(
                "GET",
                self._place,
                scope=self._repository.may("pull,push"),
                good=(204, 200, 202, 404, 400),
            )
        except RegistryBroken:
            return None
        if answer.status in (404, 400):
            return None
        self._offset = self._confirmed(answer, self._blob.size_bytes)
        if not self._offset:
            # nothing, or one byte: registries report both as 0-0
            return None
        return location_of(answer) if answer.header("Location") else self._place

    def _confirmed(self, answer: Reply, most: int) -> int:
        """The bytes that the registry confirms; it cannot have more than were sent."""
        span = _RANGE.fullmatch(answer.header("Range").strip())
        count = int(span[1]) + 1 if span and span[1] != "0" else 0
        if not span:
            count = most if answer.status == 202 else 0
        if count > most:
            raise RegistryBroken(f"{self._repository}: claims {count} bytes of {most} sent")
        return count
