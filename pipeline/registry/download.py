"""One blob from a registry: resumed after a break, and kept only if its digest matches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import RegistryBroken, RegistryUnreachable
from pipeline.files import hash_so_far, os_errors_explained, size_so_far
from pipeline.log import Bar
from pipeline.net.address import goes_on
from pipeline.net.answer import Answer
from pipeline.net.failures import Lost
from pipeline.oci.document import Descriptor
from pipeline.registry.client import ATTEMPTS
from pipeline.registry.repository import Repository
from pipeline.registry.upload import Gauge

# a connection that brings this much before each break is slow, not broken
_PROGRESS_BYTES = 1 << 20


def check_blob(repository: Repository, blob: Descriptor, bar: Bar) -> None:
    """Read a blob of any size and compare its digest; nothing is kept."""
    gauge = Gauge(bar)
    for attempt in range(ATTEMPTS):
        try:
            got = _stream(repository, blob, gauge)
        except Lost as lost:
            if attempt == ATTEMPTS - 1:
                raise RegistryUnreachable(f"{repository}: {lost}") from lost
            gauge.at(0)
            repository.client.pause(attempt, lost)
            continue
        return _require_digest(got, blob)


def _stream(repository: Repository, blob: Descriptor, gauge: Gauge) -> str:
    answer = _open_at(repository, blob, 0)
    sha, got = hashlib.sha256(), 0
    try:
        for piece in _pieces(answer, blob, got):
            got += len(piece)
            sha.update(piece)
            gauge.at(got)
    finally:
        answer.close()
    if got < blob.size_bytes and (answer.length is None or got < answer.length):
        raise Lost(f"{blob.digest}: ended after {got} of {blob.size_bytes} bytes")
    return f"sha256:{sha.hexdigest()}"


def pull_blob(repository: Repository, blob: Descriptor, partial: Path, bar: Bar) -> None:
    """Complete `partial` to the verified blob; what is there already is resumed."""
    failures, started_over, gauge = 0, False, Gauge(bar)
    while True:
        before = size_so_far(partial)
        try:
            got = _attempt(repository, blob, partial, gauge)
        except Lost as lost:
            failures = 1 if size_so_far(partial) >= before + _PROGRESS_BYTES else failures + 1
            if failures == ATTEMPTS:
                raise RegistryUnreachable(f"{repository}: {lost}") from lost
            repository.client.pause(failures - 1, lost)
            continue
        if got == blob.digest:
            gauge.at(blob.size_bytes)
            return
        partial.unlink(missing_ok=True)
        gauge.at(0)
        if started_over or not before:
            _require_digest(got, blob)
        # the kept beginning may be the damaged part: once more, from the first byte
        started_over = True


def _require_digest(got: str, blob: Descriptor) -> None:
    if got != blob.digest:
        raise RegistryBroken(f"{blob.digest}: received {got}")


def _attempt(repository: Repository, blob: Descriptor, partial: Path, gauge: Gauge) -> str:
    have = size_so_far(partial)
    if have > blob.size_bytes:
        partial.unlink()
        have = 0
    # a complete partial file is only hashed: a Range beyond the end would be refused
    if have == blob.size_bytes and have:
        return f"sha256:{_hash_of(partial, gauge).hexdigest()}"
    answer = _open_at(repository, blob, have)
    try:
        return _pour(answer, blob, partial, gauge)
    finally:
        answer.close()


def _open_at(repository: Repository, blob: Descriptor, have: int) -> Answer:
    """An answer that begins at our byte or, where the registry cannot do that, at the first."""
    headers = {"Range": f"bytes={have}-"} if have else {}
    answer = repository.client.once(
        "GET",
        f"{repository.path}/blobs/{blob.digest}",
        scope=repository.may("pull"),
        good=(200, 206, 416) if have else (200,),
        headers=headers,
    )
    span, rest = answer.header("Content-Range"), blob.size_bytes - have
    is_rest = answer.status == 206 and goes_on(span, have, blob.size_bytes)
    # a registry without Range support answers 200 with the whole blob
    if answer.status == 200 or (is_rest and (answer.length or 0) <= rest):
        return answer
    answer.close()
    return _open_at(repository, blob, 0)


def _pour(answer: Answer, blob: Descriptor, partial: Path, gauge: Gauge) -> str:
    """Append the answer to the file; returns the whole file's digest."""
    if answer.status == 200:
        partial.unlink(missing_ok=True)
    sha = _hash_of(partial, gauge)
    got = size_so_far(partial)
    if answer.status == 200 and answer.length not in (None, blob.size_bytes):
        raise RegistryBroken(
            f"{blob.digest}: named with {blob.size_bytes} bytes, sent with {answer.length}"
        )
    with os_errors_explained(partial), partial.open("ab") as out:
        for piece in _pieces(answer, blob, got):
            got += len(piece)
            out.write(piece)
            sha.update(piece)
            gauge.at(got)
    if got < blob.size_bytes:
        raise Lost(f"{blob.digest}: ended after {got} of {blob.size_bytes} bytes")
    return f"sha256:{sha.hexdigest()}"


def _pieces(answer: Answer, blob: Descriptor, got: int) -> Iterator[memoryview]:
    """The rest of the bytes; never more than the blob's descriptor allows."""
    for piece in answer.pieces():
        got += len(piece)
        if got > blob.size_bytes:
            raise RegistryBroken(f"{blob.digest}: more than the {blob.size_bytes} bytes named")
        yield piece


def _hash_of(partial: Path, gauge: Gauge) -> hashlib._Hash:
    gauge.at(0)
    return hash_so_far(partial, gauge.advance)


def keep_blob(partial: Path, final: Path) -> None:
    """Give a verified file its name."""
    with os_errors_explained(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("rb") as handle:
            os.fsync(handle.fileno())
        partial.chmod(0o644)
        os.replace(partial, final)
