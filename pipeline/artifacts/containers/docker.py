"""Docker, through its SDK: images as archives, containers of recipes, and steps of a build.

The archive is an OCI layout with Docker's `manifest.json` beside it, which old and new Docker,
Podman and skopeo all take. The layers go in as they are: no recompression, no temporary copy.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts.containers import backend
from pipeline.artifacts.containers.arguments import ContainerArguments, EngineKind, Label
from pipeline.artifacts.containers.backend import Running, StepContainer
from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts
from pipeline.artifacts.oci.document import Document, index_json, read_document
from pipeline.artifacts.oci.layout import LAYOUT, Blobs
from pipeline.artifacts.oci.tar_reader import BLOCK, END, MTIME, padding
from pipeline.artifacts.store.store import Store
from pipeline.core import log
from pipeline.core.errors import ContainerRefused, DockerUnavailable, StoreDamaged
from pipeline.core.model import canonical_json

if TYPE_CHECKING:
    from docker import DockerClient

_CHUNK_BYTES = 1 << 20
# a daemon unpacks while it receives: an image of 10 GB takes minutes on a slow disk
_LOAD_TIMEOUT_S = 3600
_LOADED = re.compile(r"Loaded image(?: ID)?: (.+)")


def docker_archive(blobs: Blobs, image: Document, tags: list[str]) -> Iterator[bytes]:
    """Yields the archive piece by piece; fails at a blob that does not match its digest."""
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


class Docker:
    """Docker, through its SDK; `place` is a socket that leads to another host's."""

    kind: EngineKind = "docker"

    def __init__(self, place: Path | None = None) -> None:
        # slow to load, and most commands need no daemon
        import docker

        with _explained("Docker does not answer"):
            self.client: DockerClient = (
                docker.DockerClient(f"unix://{place}", timeout=_LOAD_TIMEOUT_S)
                if place
                # that of DOCKER_HOST, or of the usual socket
                else docker.from_env(timeout=_LOAD_TIMEOUT_S)
            )
            self.client.ping()

    def image(self, identity: str) -> ImageFacts | None:
        from docker.errors import NotFound

        with _explained("Docker could not look for an image"), suppress(NotFound):
            return ImageFacts.model_validate(self.client.images.get(identity).attrs)
        return None

    def load(self, store: Store, name: str, digest: str, tags: Sequence[str] = ()) -> str:
        """Streams an image to Docker, which checks every diffID itself. Returns Docker's id."""
        from docker.errors import ImageLoadError
        from docker.utils import parse_repository_tag

        tags = list(tags) or [default_tag(name, digest)]
        image = read_document(store.read_blob(digest))
        total, loaded_name = archive_bytes(image), ""

        def counted(bar: log.Bar) -> Iterator[bytes]:
            for chunk in docker_archive(store, image, tags[:1]):
                bar.advance(len(chunk))
                yield chunk

        hint = "Its reason is above; `sm120 image export IMAGE DIR` needs no Docker."
        with (
            _explained(f"Docker refused {name}", hint=hint),
            log.step(f"Loading {name}, {log.size(total)}"),
        ):
            with log.progress("sent", total) as bar:
                # the SDK streams any iterable; its type only knows bytes and files
                stream: Any = counted(bar)
                # a daemon reports progress only where it is asked to
                answers = self.client.api.load_image(stream, quiet=False)  # type: ignore[no-untyped-call]
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
            loaded = self.client.images.get(loaded_name or digest)
            # one by one: containerd's image store takes but one name from an archive
            for tag in tags[1:]:
                loaded.tag(*parse_repository_tag(tag))
        return str(loaded.id)

    def create(self, arguments: ContainerArguments) -> str:
        from docker.types import DeviceRequest, Mount, Ulimit

        # fails where the folder is missing; Docker would make one for `volumes`
        mounts = [
            Mount(m.inside, m.host, type="bind", read_only=m.read_only) for m in arguments.mounts
        ]
        if arguments.cache:
            mounts.append(Mount(arguments.cache.inside, arguments.cache.name, type="volume"))
        port, cards = None if arguments.host_network else arguments.port, arguments.devices
        # the same as `run_flags`
        wanted: dict[str, Any] = {
            "name": arguments.name,
            "image": arguments.image,
            "entrypoint": arguments.entrypoint,
            "command": arguments.arguments,
            "environment": arguments.environment,
            "labels": arguments.labels,
            "mounts": mounts,
            "ports": {f"{port}/tcp": (arguments.address, port)} if port else {},
            "network_mode": "host" if arguments.host_network else None,
            "ipc_mode": "host" if arguments.ipc == "host" else None,
            "shm_size": arguments.shm_bytes,
            "ulimits": [Ulimit(name="memlock", soft=-1, hard=-1)] * arguments.memory_locked,
            "device_requests": [DeviceRequest(driver="cdi", device_ids=cards)] if cards else [],
            # an engine needs no rights of root; a recipe names those that it wants
            "cap_drop": ["ALL"],
            "cap_add": arguments.capabilities,
            "security_opt": ["no-new-privileges"],
        }
        with _explained("Docker could not create the container", ContainerRefused):
            return str(self.client.containers.create(**wanted).id)

    def start(self, identity: str) -> None:
        # a port that is taken or a card that is not there shows only now
        with _explained("Docker could not start the container", ContainerRefused):
            self.client.api.start(identity)

    def containers(self) -> list[ContainerFacts]:
        with _explained("Docker could not list containers"):
            rows = self.client.api.containers(all=True, filters={"label": Label.RECIPE})
            found = [self.container(str(row["Id"])) for row in rows]
            # one may have gone since it was listed
            return sorted((x for x in found if x is not None), key=lambda x: x.name)

    def container(self, name: str) -> ContainerFacts | None:
        from docker.errors import NotFound

        with _explained("Docker could not look at a container"), suppress(NotFound):
            return ContainerFacts.model_validate(self.client.api.inspect_container(name))
        return None

    def output(self, identity: str, *, follow: bool, tail: int | None = None) -> Iterator[bytes]:
        lines: Any = "all" if tail is None else tail
        with _explained("Docker could not read the log"):
            yield from self.client.api.logs(identity, stream=True, follow=follow, tail=lines)

    def stop(self, identity: str, timeout_s: int) -> None:
        with _explained("Docker could not stop the container"):
            self.client.api.stop(identity, timeout=timeout_s)

    def remove(self, identity: str) -> None:
        from docker.errors import NotFound

        with _explained("Docker could not remove the container"), suppress(NotFound):
            # `v`: with its anonymous volumes, which would fill the disk
            self.client.api.remove_container(identity, force=True, v=True)

    def close(self) -> None:
        self.client.close()

    @contextmanager
    def running(self, container: StepContainer, command: Sequence[str]) -> Iterator[Running]:
        """Runs a step; its output comes through a pipe, as that of a process does."""
        from docker.errors import DockerException
        from docker.types import Ulimit
        from urllib3.exceptions import HTTPError

        as_caller = {
            "read_only": True,
            "working_dir": backend.WORK,
            "user": f"{os.geteuid()}:{os.getegid()}",
            "command": [*backend.with_environment(container.env), *command],
        }
        wanted: dict[str, Any] = {
            "image": container.image,
            **({"command": list(command)} if container.user else as_caller),
            "entrypoint": [],
            "labels": {backend.LABEL: str(container.scratch)},
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "hostname": backend.HOST_NAME,
            "mem_limit": container.limits.memory_bytes,
            # swap counts too, or there would be no limit
            "memswap_limit": container.limits.memory_bytes,
            "cpuset_cpus": container.processors,
            "shm_size": backend.SHM_BYTES,
            "ulimits": [
                Ulimit(name=n, soft=x, hard=x) for n, x in backend.process_limits().items()
            ],
            "volumes": [f"{path.absolute()}:{at}" for at, path in container.mounts.items()],
        }
        hint = "Its reason is above; finished objects are kept, so run it again."
        with _explained("Docker ended the build", hint=hint):
            for left in self.client.containers.list(all=True, filters={"label": backend.LABEL}):
                if backend.is_left(left.labels[backend.LABEL]):
                    left.remove(force=True)
            created = self.client.containers.create(**wanted)
            output, into = os.pipe()

            def follow() -> None:
                with suppress(OSError, HTTPError), os.fdopen(into, "wb", buffering=0) as pipe:
                    for chunk in stream:
                        pipe.write(chunk)

            try:
                stream = created.attach(stream=True, logs=True)
                created.start()
                threading.Thread(target=follow, daemon=True).start()
                yield Running(output, lambda: int(created.wait()["StatusCode"]))
            finally:
                os.close(output)
                with suppress(DockerException):
                    created.remove(force=True)


@contextmanager
def _explained(
    what: str,
    kind: type[DockerUnavailable] | type[ContainerRefused] = DockerUnavailable,
    hint: str = "",
) -> Iterator[None]:
    from docker.errors import DockerException
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except (DockerException, RequestException, HTTPError) as error:
        raise kind(f"{what}: {_reason(error)}", hint) from error


def _reason(error: Exception) -> str:
    # the daemon explains itself; the SDK adds URLs and numbers to it
    return " ".join(str(getattr(error, "explanation", None) or error).split())[:400]
