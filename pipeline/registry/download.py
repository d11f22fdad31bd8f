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
from pipeline.registry.repository import Repository


def check_blob(repository: Repository, blob: Descriptor, bar: Bar) -> None:
    """Read a blob of any size and compare its digest; nothing is kept."""
    open_at, gauge = _opener(repository, blob), Gauge(bar)

    def once() -> str:
        gauge.at(0)
        with open_at(0) as answer:
            require_length(answer, blob.size_bytes)
            return pour(answer, hashlib.sha256(), 0, blob.size_bytes, gauge)

    _require_digest(repository, blob, lambda: repository.client.patience.retried(once))


def pull_blob(repository: Repository, blob: Descriptor, partial: Path, bar: Bar) -> None:
    """Complete `partial` to the verified blob; what is there already is resumed."""
    open_at, gauge, patience = _opener(repository, blob), Gauge(bar), repository.client.patience
    _require_digest(
        repository,
        blob,
        lambda: download(open_at, partial, blob.digest, blob.size_bytes, gauge, patience),
    )


def _opener(repository: Repository, blob: Descriptor) -> OpenAt:
    def open_at(start: int) -> Answer:
        return repository.client.once(
            "GET",
            f"{repository.path}/blobs/{blob.digest}",
            scope=repository.may("pull"),
            good=(200, 206, 416) if start else (200,),
            headers={"Range": f"bytes={start}-"} if start else {},
        )

    return open_at


def _require_digest(repository: Repository, blob: Descriptor, receive: Callable[[], str]) -> None:
    try:
        got = receive()
    except BadAnswer as error:
        raise RegistryBroken(f"{blob.digest}: {error}") from error
    except Lost as lost:
        raise RegistryUnreachable(f"{repository}: {lost}") from lost
    if got != blob.digest:
        raise RegistryBroken(f"{blob.digest}: received {got}")
