"""Putting a built image into a Docker daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline import log
from pipeline.assemble.image import Built
from pipeline.errors import DockerUnavailable
from pipeline.oci.archive import archive_bytes, docker_archive
from pipeline.store.store import Store

if TYPE_CHECKING:
    from docker import DockerClient

_LOAD_TIMEOUT_S = 3600


def default_tag(built: Built) -> str:
    """A tag that cannot move: it carries the digest."""
    return f"sm120/{built.name}:{built.digest.removeprefix('sha256:')[:12]}"


def connect() -> DockerClient:
    """The daemon that DOCKER_HOST or the usual socket names."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=_LOAD_TIMEOUT_S)
        client.ping()
    except DockerException as error:
        raise DockerUnavailable(f"Docker does not answer: {_words(error)}") from error
    return client


def load(store: Store, built: Built, tags: list[str]) -> str:
    """Stream the image to Docker; it checks every diffID itself. Returns Docker's image id."""
    from docker.errors import DockerException
    from requests import RequestException

    client = connect()
    title = f"Loading {built.name}, {log.size(built.size_bytes)}"
    try:
        with log.step(title), log.progress("sent", archive_bytes(built)) as bar:
            stream = _counted(docker_archive(store, built, tags), bar)
            # the SDK streams any iterable; its type only knows bytes and files
            images = client.images.load(stream)  # type: ignore[arg-type]
    except (DockerException, RequestException) as error:
        raise DockerUnavailable(f"Docker refused {built.name}: {_words(error)}") from error
    return str(images[0].id) if images else ""


def _counted(stream: Iterator[bytes], bar: log.Bar) -> Iterator[bytes]:
    for chunk in stream:
        bar.advance(len(chunk))
        yield chunk


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
