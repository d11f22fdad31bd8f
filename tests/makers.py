"""Small wheels, .debs and checkouts, made on the spot from plain values."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.artifacts.oci.document import OCI_MANIFEST, Descriptor
from pipeline.artifacts.oci.record import ImageRecord, Kind, LayerRecord, TitledLayer
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.model import sha256_of
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.assemble import locked_layers as pinned
from pipeline.images.assemble.image import Built, assemble_images
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.assemble.locked_layers import Counts
from pipeline.images.assemble.plan import ImagePlan, plan_image
from pipeline.images.fetch.inputs import Fetcher
from pipeline.images.fetch.sources import Sources
from pipeline.images.lock.model import BasePin, DebPin, ImageLock, WheelPin, sealed_lock, write_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import DebianSpec, ImageSpec
from tests.testbed.deb_file import Item, write_deb

AMD64 = "linux/amd64"
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Part:
    """One file of a wheel, where its bytes alone do not say all."""

    data: bytes = b""
    mode: int = 0o100644
    method: int = zipfile.ZIP_DEFLATED


Parts = Mapping[str, bytes | Part]


def record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
    quoted = f'"{name}"' if "," in name else name
    return f"{quoted},sha256={digest},{len(data)}\n"


def record_of(parts: Parts, record_name: str) -> str:
    rows = [record_line(n, p if isinstance(p, bytes) else p.data) for n, p in parts.items()]
    return "".join([*rows, f"{record_name},,\n"])


def wheel_parts(name: str, version: str, parts: Parts) -> dict[str, bytes | Part]:
    """The files with the metadata that every wheel has; what is given wins."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    whole = {**parts, f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel, **parts}
    if f"{info}/RECORD" not in whole:
        whole[f"{info}/RECORD"] = record_of(whole, f"{info}/RECORD").encode()
    return whole


def write_zip(path: Path, parts: Parts) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            part = Part(part) if isinstance(part, bytes) else part
            info = zipfile.ZipInfo("x", EPOCH)
            info.filename = name
            info.external_attr = part.mode << 16
            info.compress_type = part.method
            archive.writestr(info, part.data)
    return path


def make_wheel(folder: Path, name: str, parts: Parts | None = None, version: str = "1.0") -> Path:
    """A wheel with a true RECORD, unless one is given among its parts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    given = {f"{name}/__init__.py": b"x = 1\n"} if parts is None else parts
    return write_zip(path, wheel_parts(name, version, given))


def make_deb(folder: Path, name: str, *items: Item, architecture: str = "amd64") -> Path:
    """A good .deb with some files."""
    folder.mkdir(parents=True, exist_ok=True)
    return write_deb(folder, name, items, architecture=architecture)


def _sized(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def wheel_pin(path: Path) -> WheelPin:
    name, version = path.name.split("-")[:2]
    return WheelPin(name=name.replace("_", "-"), version=version, file=path.name, **_sized(path))


def deb_pin(path: Path) -> DebPin:
    name, version, _ = path.name.split("_")
    return DebPin(name=name, version=version, path=f"pool/{path.name}", **_sized(path))


@dataclass
class Image:
    """What `make_checkout` writes for one image."""

    spec: dict[str, Any]
    wheels: Sequence[Path] = ()
    debs: Sequence[Path] = ()
    files: dict[str, str] = field(default_factory=dict)
    platform: str = AMD64
    base_image: BasePin | None = None

    @property
    def name(self) -> str:
        return str(self.spec["name"])


def root_image(debs: Sequence[Path], *, platform: str = AMD64, **more: Any) -> Image:
    """A Debian root image."""
    spec = {
        "name": "root",
        "summary": "a small root for tests",
        "platforms": [platform],
        "debian": {},
        "debs": ["tool"],
        "accounts": [{"name": "engine", "uid": 1000, "gid": 1000, "home": "/home/engine"}],
        "env": {"PATH": "/opt/venv/bin:/usr/bin"},
        **more,
    }
    return Image(spec, debs=debs, platform=platform)


def wheel_image(name: str, wheels: Sequence[Path], **more: Any) -> Image:
    """An image of wheels on the root image."""
    python = {"requirements": [f"{wheels[0].name.split('-')[0]}==1.0"], **more.pop("python", {})}
    spec = {
        "name": name,
        "summary": "a small engine for tests",
        "base": "root",
        "platforms": [AMD64],
        "python": python,
        **more,
    }
    return Image(spec, wheels)


def make_checkout(root: Path, *images: Image) -> Checkout:
    """A checkout with specs and locks that answer them; bases come before what stands on them."""
    checkout = Checkout(root)
    locks: dict[str, ImageLock] = {}
    for image in images:
        folder = checkout.folder(image.name)
        for name, text in {"image.yaml": json.dumps(image.spec), **image.files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="")
        spec = checkout.spec(image.name)
        base = locks[spec.parent].seal if spec.parent else None
        pins = [wheel_pin(p) for p in image.wheels], [deb_pin(p) for p in image.debs]
        locks[image.name] = sealed_lock(
            image.name, image.platform, spec.lock_digest(), base, *pins, image.base_image
        )
        write_lock(checkout.lock_path(image.name, image.platform), locks[image.name])
    return checkout


def folder_fetcher(store: Store, mirror: Path) -> Fetcher:
    """A fetcher that knows one folder and no network."""
    client = NetClient(NetworkSettings(indexes=(), mirrors=(str(mirror),)))
    return Fetcher(store, client, Sources(client), offline=True)


@dataclass(frozen=True)
class Edit:
    """A change of one file in a wheel, written as a patch and its promise."""

    path: str
    before: bytes
    after: bytes

    @property
    def diff(self) -> str:
        old, new = (x.decode().splitlines(keepends=True) for x in (self.before, self.after))
        return "".join(unified_diff(old, new, f"a/{self.path}", f"b/{self.path}"))

    @property
    def promise(self) -> dict[str, str]:
        return {
            "path": self.path,
            "before": sha256_of(self.before),
            "after": sha256_of(self.after),
        }


def patch_spec(*edits: Edit, applies_to: str = "pkg==1.0", **more: Any) -> dict[str, Any]:
    """One patch as series.yaml lists it."""
    return {
        "file": "0001.patch",
        "why": "because a test needs a reason that is long enough",
        "upstream": ["https://example.org/1"],
        "applies_to": applies_to,
        "gate": "some-gate",
        "files": [edit.promise for edit in edits],
        **more,
    }


def patch_files(*edits: Edit, **more: Any) -> dict[str, str]:
    """A series of one patch, as files of an image's folder."""
    return {
        "patches/series.yaml": json.dumps({"patches": [patch_spec(*edits, **more)]}, indent=1),
        "patches/0001.patch": "".join(edit.diff for edit in edits),
    }


@contextmanager
def threads(_: Store, counts: Counts) -> Iterator[ThreadPoolExecutor]:
    """In place of worker processes, which take longer to start."""
    with ThreadPoolExecutor(2, initializer=pinned.begin_worker, initargs=(counts,)) as pool:
        yield pool


def build(
    checkout: Checkout,
    store: Store,
    mirror: Path,
    *names: str,
    accept: bool = True,
    keep_inputs: bool = False,
    processes: bool = False,
    platform: str = AMD64,
) -> list[Built]:
    """Build offline from a folder."""
    plans = [plan_image(checkout, name, platform) for name in names]
    workers = nullcontext() if processes else mock.patch.object(pinned, "_workers", threads)
    with workers:
        return assemble_images(
            checkout,
            store,
            plans,
            lambda: folder_fetcher(store, mirror),
            accept=accept,
            keep_inputs=keep_inputs,
        )


def build_in(place: Path, *images: Image) -> tuple[Checkout, Store, Built]:
    """The last of these images, built in a new store from the files in `mirror`."""
    checkout, store = make_checkout(place / "checkout", *images), open_store(place / "store")
    return checkout, store, build(checkout, store, place / "mirror", images[-1].name)[0]


def image_record(digest: str, *, size_bytes: int = 1, base: tuple[str, ...] = ()) -> ImageRecord:
    """A record of an image with one layer, all of them of one digest."""
    layer = LayerRecord(
        digest=digest, diff_id=digest, size_bytes=size_bytes, unpacked_bytes=size_bytes
    )
    return ImageRecord(
        key=digest,
        code=digest,
        config=digest,
        descriptor=Descriptor(media_type=OCI_MANIFEST, digest=digest, size_bytes=1),
        layers=(TitledLayer(title="x", record=layer),),
        base=base,
    )


def built_image(name: str, platform: str, digest: str) -> Built:
    """An image for what only asks for its names and digest."""
    spec = ImageSpec(
        name=name, summary="an image for tests", platforms=[platform], debian=DebianSpec()
    )
    lock = sealed_lock(name, platform, spec.lock_digest(), None, [], [])
    plan = ImagePlan(spec, platform, lock, (), None, {})
    return Built(plan, image_record(digest), cached=True)


def file_in_image(store: Store, built: Built, path: str) -> bytes | None:
    """A file as a container would see it, from the last layer that has it; links not followed.

    The layers of a foreign base lie below all others and are not looked into.
    """
    for layer in reversed(built.layers):
        if layer.record.is_foreign:
            break
        rows = {row.path: row for row in store.contents(layer.record)}
        row = rows.get(path.lstrip("/"))
        if row is not None and row.kind == Kind.HARDLINK:
            row = rows[row.target]
        if row is not None:
            blob = store.blob_path(layer.record.digest)
            return read_layer_file(blob, row) if row.kind == Kind.FILE else None
    return None
