"""One blob from a registry: resumed after a break, and kept only if its digest matches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import RegistryBroken, RegistryUnreachable
from pipeline.log import Bar, Gauge
from pipeline.net.answer import Answer
from pipeline.net.download import OpenAt, download, pour, require_length
from pipeline.net.failures import BadAnswer, Lost
from pipeline.oci.document import Descriptor
from pipeline.registry.client import RegistryRequest
from pipeline.registry.repository import Repository


def check_blob(repository: Repository, blob: Descriptor, bar: Bar) -> None:
    """Reads a blob of any size and compares its digest; nothing is kept."""

    def receive(open_at: OpenAt, gauge: Gauge) -> str:
        def once() -> str:
            gauge.at(0)
            with open_at(0) as answer:
                require_length(answer, blob.size_bytes)
                return pour(answer, hashlib.sha256(), 0, blob.size_bytes, gauge)

        return repository.client.patience.retried(once)

    _receive(repository, blob, bar, receive)


def pull_blob(repository: Repository, blob: Descriptor, partial: Path, bar: Bar) -> None:
    """Completes `partial` to the verified blob; bytes that it has already are not sent again."""

    def receive(open_at: OpenAt, gauge: Gauge) -> str:
        patience = repository.client.patience
        return download(open_at, partial, blob.digest, blob.size_bytes, gauge, patience)

    _receive(repository, blob, bar, receive)


def _receive(
    repository: Repository, blob: Descriptor, bar: Bar, receive: Callable[[OpenAt, Gauge], str]
) -> None:
    place, scope = f"{repository.path}/blobs/{blob.digest}", repository.may("pull")

    def open_at(start: int) -> Answer:
        part = {"Range": f"bytes={start}-"} if start else {}
        good = (200, 206, 416) if start else (200,)
        return repository.client.once(RegistryRequest("GET", place, scope, good, part))

    try:
        got = receive(open_at, Gauge(bar))
    except BadAnswer as error:
        raise RegistryBroken(f"{blob.digest}: {error}") from error
    except Lost as lost:
        raise RegistryUnreachable(f"{repository}: {lost}") from lost
    if got != blob.digest:
        raise RegistryBroken(f"{blob.digest}: received {got}")
