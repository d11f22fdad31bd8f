"""An image for Docker: as one tar archive, and into a daemon.

The archive is an OCI layout with Docker's `manifest.json` beside it, which old and new Docker,
Podman and skopeo all take. The layers go in as they are: no recompression, no temporary copy.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.oci.document import Document, index_json, read_document
from pipeline.artifacts.oci.layout import LAYOUT, Blobs
from pipeline.artifacts.oci.tar_reader import BLOCK, END, MTIME, padding
from pipeline.core import log
from pipeline.core.errors import DockerUnavailable, StoreDamaged
from pipeline.core.model import canonical_json

if TYPE_CHECKING:
    from docker import DockerClient

_CHUNK_BYTES = 1 << 20
# a daemon unpacks while it receives: an image of 10 GB takes minutes on a slow disk
_LOAD_TIMEOUT_S = 3600
_LOADED = re.compile(r"Loaded image(?: ID)?: (.+)")


def docker_archive(blobs: Blobs, image: Document, tags: list[str]) -> Iterator[bytes]:
    """The archive's bytes, piece by piece; a blob that is not its digest breaks it off."""
    names = {blob.digest: "blobs/" + blob.digest.replace(":", "/") for blob in image.blobs}
    docker = {
        "Config": names[image.config.digest] if image.config else "",
        "RepoTags": tags,
        "Layers": [names[x.digest] for x in image.layers],
    }
    # containerd's image store takes the name from here, Docker's old one from manifest.json
    named = {"io.containerd.image.name": tags[0]} if tags else {}
    index = index_json([image.descriptor.model_copy(update={"annotations": named})])
    documents = {"oci-layout": LAYOUT, "index.json": index}
    documents["manifest.json"] = canonical_json([docker])
    for name, data in documents.items():
        yield _head(name, len(data)) + data + padding(len(data))
    for blob in (image.descriptor, *image.blobs):
        path, part = blobs.blob_path(blob.digest), image.part(blob.digest)
        sha, remaining = hashlib.sha256(), blob.size_bytes
        yield _head("blobs/" + blob.digest.replace(":", "/"), blob.size_bytes)
        try:
            with path.open("rb") as handle:
                while chunk := handle.read(_CHUNK_BYTES):
                    sha.update(chunk)
                    remaining -= len(chunk)
                    # a reader would take bytes beyond the stated size for the next header
                    if remaining < 0:
                        break
                    yield chunk
        except FileNotFoundError as error:
            raise StoreDamaged(f"{part} is missing: there is no {path}") from error
        if remaining or f"sha256:{sha.hexdigest()}" != blob.digest:
            raise StoreDamaged(f"{part} is damaged: {path} does not match its digest")
        yield padding(blob.size_bytes)
    yield END


def _head(name: str, size_bytes: int) -> bytes:
    # the same archive for the same image: no times and no names of this machine
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size_bytes, MTIME, 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def archive_bytes(image: Document) -> int:
    """About how large the archive is, for a progress bar."""
    return sum(x.size_bytes for x in image.layers) + len(image.layers) * BLOCK * 2


def default_tag(name: str, digest: str) -> str:
    """A tag that cannot move: it carries the digest."""
    return f"sm120/{name}:{digest.removeprefix('sha256:')[:12]}"


def moving_tag(name: str) -> str:
    """The tag of whatever was loaded last: `docker run sm120/NAME` takes it."""
    return f"sm120/{name}:latest"


def connect(place: Path | None = None) -> DockerClient:
    """The daemon of a socket; without one, that of DOCKER_HOST or of the usual socket."""
    # slow to load, and most commands need no daemon
    import docker
    from docker.errors import DockerException

    try:
        if place is None:
            client = docker.from_env(timeout=_LOAD_TIMEOUT_S)
        else:
            client = docker.DockerClient(f"unix://{place}", timeout=_LOAD_TIMEOUT_S)
        client.ping()
    except DockerException as error:
        raise DockerUnavailable(f"Docker does not answer: {_reason(error)}") from error
    return client


def load(
    blobs: Blobs, name: str, digest: str, tags: list[str], client: DockerClient | None = None
) -> str:
    """Streams an image to Docker; it checks every diffID itself. Returns Docker's image id."""
    from docker.errors import DockerException, ImageLoadError
    from docker.utils import parse_repository_tag
    from requests import RequestException

    client = client or connect()
    image = read_document(blobs.read_blob(digest))
    total, loaded_name = archive_bytes(image), ""

    def counted(bar: log.Bar) -> Iterator[bytes]:
        for chunk in docker_archive(blobs, image, tags[:1]):
            bar.advance(len(chunk))
            yield chunk

    try:
        with log.step(f"Loading {name}, {log.size(total)}"):
            with log.progress("sent", total) as bar:
                # the SDK streams any iterable; its type only knows bytes and files
                stream: Any = counted(bar)
                # a daemon reports progress only where it is asked to
                answers = client.api.load_image(stream, quiet=False)  # type: ignore[no-untyped-call]
            # Docker unpacks the image now, which takes longer than sending
            with log.progress("unpacked", total) as bar:
                layers: defaultdict[str, log.Gauge] = defaultdict(lambda: log.Gauge(bar))
                for answer in answers:
                    if detail := answer.get("errorDetail"):
                        raise ImageLoadError(detail.get("message", ""))
                    # in bytes of the archive; an image store that counts otherwise reports nothing
                    if answer.get("status") == "Loading layer":
                        at = answer.get("progressDetail", {}).get("current", 0)
                        layers[answer.get("id", "")].at(at)
                    if named := _LOADED.match(answer.get("stream", "")):
                        loaded_name = named[1].strip()
            loaded = client.images.get(loaded_name or digest)
            # one by one: containerd's image store takes but one name from an archive
            for tag in tags[1:]:
                loaded.tag(*parse_repository_tag(tag))
    except (DockerException, RequestException) as error:
        hint = "Its reason is above; `sm120 image export IMAGE DIR` needs no Docker."
        raise DockerUnavailable(f"Docker refused {name}: {_reason(error)}", hint) from error
    return str(loaded.id)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
