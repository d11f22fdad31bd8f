"""Images as others make them: real tar and gzip bytes, in a small registry or a layout folder."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testbed.tiny_registry import TinyRegistry, digest_of

OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
GZIP_LAYER, ZSTD_LAYER, PLAIN_LAYER = (
    f"{OCI}.layer.v1.tar{form}" for form in ("+gzip", "+zstd", "")
)
REPOSITORY = "team/base"
PASSWD = b"root:x:0:0:root:/root:/bin/sh\napp:x:1001:1002::/home/app:/bin/sh\n"


@dataclass(frozen=True)
class Thing:
    """One entry of a layer; what it is follows from what is given."""

    name: str
    data: bytes = b""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    target: str = ""
    kind: bytes = tarfile.REGTYPE
    pax: dict[str, str] = field(default_factory=dict)

    def info(self) -> tarfile.TarInfo:
        found = tarfile.TarInfo(self.name)
        found.size, found.mode, found.uid, found.gid = len(self.data), self.mode, self.uid, self.gid
        found.type, found.linkname, found.pax_headers = self.kind, self.target, dict(self.pax)
        return found


def folder(name: str, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Thing:
    return Thing(name, mode=mode, uid=uid, gid=gid, kind=tarfile.DIRTYPE)


def link(name: str, target: str) -> Thing:
    return Thing(name, mode=0o777, target=target, kind=tarfile.SYMTYPE)


def tar_of(*things: Thing, form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for thing in things:
            archive.addfile(thing.info(), io.BytesIO(thing.data))
    return out.getvalue()


@dataclass(frozen=True)
class Layer:
    """A layer's blob, and what its tar is."""

    blob: bytes
    diff_id: str
    media_type: str = GZIP_LAYER

    @property
    def described(self) -> dict[str, Any]:
        return {
            "mediaType": self.media_type,
            "digest": digest_of(self.blob),
            "size": len(self.blob),
        }


def gzipped(tar: bytes, media_type: str = GZIP_LAYER) -> Layer:
    return Layer(gzip.compress(tar, mtime=0), digest_of(tar), media_type)


def zstd_packed(tar: bytes, *, frames: int = 1, window_log: int = 20) -> Layer:
    """A layer as newer builders write it; zstd:chunked has a skippable frame behind the others."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.CompressionParameter.window_log: window_log}
    size = -(-len(tar) // frames)
    parts = [tar[at : at + size] for at in range(0, len(tar), size)]
    engines = [zstd.ZstdCompressor(options=options) for _ in parts]
    # in two steps, so that the frame names its window and not the size of what it holds
    blob = b"".join(e.compress(p) + e.flush() for e, p in zip(engines, parts, strict=True))
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"table"
    return Layer(blob + skippable, digest_of(tar), ZSTD_LAYER)


def layer_of(*things: Thing) -> Layer:
    return gzipped(tar_of(*things))


def system_layer(*more: Thing) -> Layer:
    """What most bases have: users, a Python, a home that is somebody's."""
    return layer_of(
        *(folder("etc"), folder("home"), folder("home/app", 0o750, 1001, 1002)),
        *(folder("opt"), folder("usr"), folder("usr/bin"), folder("srv", 0o1777)),
        Thing("etc/passwd", PASSWD),
        Thing("usr/bin/python3.11", b"\x7fELF", 0o755),
        Thing("usr/bin/tool", b"old\n", 0o755),
        link("bin", "usr/bin"),
        *more,
    )


SETTINGS: dict[str, Any] = {
    "Env": ["PATH=/usr/local/bin:/usr/bin", "LANG=C"],
    "Entrypoint": ["/usr/bin/tool"],
    "Cmd": ["--help"],
    "User": "app",
    "WorkingDir": "/home/app",
    "ExposedPorts": {"53/udp": {}},
    "Volumes": {"/data": {}},
    "Labels": {"org.opencontainers.image.title": "somebody else's", "sm120.lock": "false"},
    "StopSignal": "SIGINT",
    "Healthcheck": {"Test": ["NONE"]},
}


def config_of(layers: Sequence[Layer], **changes: Any) -> dict[str, Any]:
    """A config that fits its layers, unless it is told otherwise."""
    return {
        "os": "linux",
        "architecture": "amd64",
        "created": "2025-01-02T03:04:05Z",
        "config": SETTINGS,
        "rootfs": {"type": "layers", "diff_ids": [x.diff_id for x in layers]},
        "history": [
            *({"created_by": f"step {i}"} for i in range(len(layers))),
            {"created_by": "ENV LANG=C", "empty_layer": True},
        ],
        **changes,
    }


@dataclass(frozen=True)
class ForeignImage:
    """An image by its bytes."""

    layers: tuple[Layer, ...]
    config: bytes
    manifest: bytes
    media_type: str = f"{OCI}.manifest.v1+json"

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def blobs(self) -> dict[str, bytes]:
        return {digest_of(x): x for x in (self.config, *(y.blob for y in self.layers))}

    def put(self, tiny: TinyRegistry, repository: str = REPOSITORY) -> None:
        for digest, data in self.blobs.items():
            tiny.blobs[repository, digest] = data
        tiny.manifests[repository, self.digest] = self.media_type, self.manifest

    def write(self, folder: Path) -> None:
        """As a layout folder keeps its blobs."""
        place = folder / "blobs" / "sha256"
        place.mkdir(parents=True, exist_ok=True)
        for data in (*self.blobs.values(), self.manifest):
            (place / hashlib.sha256(data).hexdigest()).write_bytes(data)


def foreign_image(
    *layers: Layer, manifest: dict[str, Any] | None = None, **config: Any
) -> ForeignImage:
    """An image of these layers; `manifest` changes its manifest, the rest its config."""
    chosen = layers or (system_layer(),)
    data = json.dumps(config_of(chosen, **config)).encode()
    found = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": {
            "mediaType": f"{OCI}.config.v1+json",
            "digest": digest_of(data),
            "size": len(data),
        },
        "layers": [x.described for x in chosen],
        **(manifest or {}),
    }
    return ForeignImage(chosen, data, json.dumps(found).encode(), str(found["mediaType"]))


def index_of(*parts: tuple[ForeignImage, str]) -> bytes:
    """An index over images by platform, with what builders add to one."""
    entries = [
        {
            "mediaType": image.media_type,
            "digest": image.digest,
            "size": len(image.manifest),
            "platform": dict(zip(("os", "architecture", "variant"), p.split("/"), strict=False)),
        }
        for image, p in parts
    ]
    return json.dumps(
        {"schemaVersion": 2, "mediaType": f"{OCI}.index.v1+json", "manifests": entries}
    ).encode()


def put_index(tiny: TinyRegistry, index: bytes, repository: str = REPOSITORY) -> str:
    tiny.manifests[repository, digest_of(index)] = f"{OCI}.index.v1+json", index
    return digest_of(index)
