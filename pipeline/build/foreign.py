"""A foreign base in the store: its layers read once, its config, its users, its Python."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from pipeline import log
from pipeline.build.entry import Kind, parents
from pipeline.build.oci import TitledLayer
from pipeline.build.plan import foreign_key
from pipeline.build.tarball import Header, TarStream, open_layer
from pipeline.build.view import OPAQUE, WHITEOUT, View, follow, see
from pipeline.errors import BaseUnusable, CorruptArchive, HostileArchive, WishInvalid
from pipeline.lock.model import BasePin, LayerPin
from pipeline.log import Bar
from pipeline.registry.config import ImageConfig, read_config
from pipeline.store.record import FileRow, LayerRecord
from pipeline.store.store import Store

_MOST_PASSWD_BYTES = 1 << 20
_MOST_READERS = 4
_MUSL = re.compile(r"(usr/)?lib/ld-musl-[a-z0-9_]+\.so\.1")
_PYTHON_FOLDERS = ("usr/bin", "usr/local/bin")


def read_layers(store: Store, pin: BasePin) -> None:
    """List what each layer holds, unless that was done before; each must have its diffID."""
    wanted = {layer.digest: layer for layer in pin.layers}
    missing = [x for x in wanted.values() if store.layer(foreign_key(x)) is None]
    if not missing:
        return
    total = sum(x.size_bytes for x in missing)
    title = f"Reading {len(missing)} layers of {pin.repository}, {log.size(total)}"
    with (
        log.step(title),
        log.progress("read", total) as bar,
        ThreadPoolExecutor(min(_MOST_READERS, len(missing))) as pool,
    ):
        list(pool.map(lambda layer: _read_layer(store, layer, bar), missing))


def base_layers(store: Store, pin: BasePin) -> list[TitledLayer]:
    """The layers as they are, from the bottom."""
    found = []
    for number, layer in enumerate(pin.layers, 1):
        record = store.layer(foreign_key(layer))
        if record is None:
            raise BaseUnusable(f"{pin}: its layer {layer.digest} is gone from the store")
        found.append(TitledLayer(layer_title(number), record))
    return found


def layer_title(number: int) -> str:
    """What a person calls a layer of a foreign base."""
    return f"base layer {number}"


def _read_layer(store: Store, layer: LayerPin, bar: Bar) -> None:
    try:
        with open_layer(store.blob_path(layer.digest), layer.media_type) as stream:
            rows = [row for header in stream.entries() if (row := _row(stream, header))]
    except (CorruptArchive, HostileArchive) as error:
        raise type(error)(f"{layer.digest}: {error}") from error
    if stream.diff_id != layer.diff_id:
        raise BaseUnusable(
            f"the layer {layer.digest} unpacks to {stream.diff_id}, not to {layer.diff_id} as its"
            " config says"
        )
    record = LayerRecord(
        digest=layer.digest,
        diff_id=layer.diff_id,
        size_bytes=layer.size_bytes,
        unpacked_bytes=stream.unpacked_bytes,
        media_type=layer.media_type,
        is_foreign=True,
    )
    store.keep_foreign_layer(foreign_key(layer), record, rows)
    bar.advance(layer.size_bytes)


def _row(stream: TarStream, header: Header) -> FileRow | None:
    folder, _, name = header.path.rpartition("/")
    if name.startswith(".wh."):
        return _taken_away(folder, name)
    if not header.path:
        return None
    sha256 = ""
    if header.kind == Kind.FILE.value:
        sha = hashlib.sha256()
        for piece in stream.content(header):
            sha.update(piece)
        sha256 = sha.hexdigest()
    return FileRow(
        header.path,
        header.kind,
        header.mode,
        header.size_bytes if header.kind == Kind.FILE.value else 0,
        sha256,
        0,
        header.target,
        "",
        header.uid,
        header.gid,
    )


def _taken_away(folder: str, name: str) -> FileRow | None:
    """A whiteout: the path it removes, or the folder it empties."""
    if name == ".wh..wh..opq":
        return FileRow(folder, OPAQUE, 0, 0, "", 0, "", "")
    hidden = name.removeprefix(".wh.")
    if hidden.startswith(".wh."):
        return None  # what aufs kept for itself
    if hidden in ("", ".", ".."):
        raise HostileArchive(f"the whiteout {folder}/{name} removes no file")
    path = f"{folder}/{hidden}" if folder else hidden
    return FileRow(path, WHITEOUT, 0, 0, "", 0, "", "")


@dataclass(frozen=True)
class Foreign:
    """A locked base whose layers were read."""

    store: Store
    pin: BasePin

    @cached_property
    def config(self) -> ImageConfig:
        return read_config(self.store.read_blob(self.pin.config.digest))

    @cached_property
    def view(self) -> View[LayerRecord]:
        """Its files as a container sees them."""
        layers = [x.record for x in base_layers(self.store, self.pin)]
        return see((record, self.store.table(record)) for record in layers)

    @cached_property
    def rows(self) -> dict[str, FileRow]:
        return {path: row for path, (_, row) in self.view.items()}

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """A small file, links followed; none where there is no such file."""
        found, _ = follow(self.rows, path)
        if found not in self.view:
            return None
        record, row = self.view[found]
        if row.kind == Kind.HARDLINK.value:
            found = row.target
        with open_layer(self.store.blob_path(record.digest), record.media_type) as stream:
            data = None
            for header in stream.entries():
                if header.path == found and header.kind == Kind.FILE.value:
                    if header.size_bytes > most_bytes:
                        raise BaseUnusable(f"{self.pin}: /{found} is of {header.size_bytes} bytes")
                    data = b"".join(stream.content(header))
        return data

    def user(self, image: str, name: str, passwd: bytes | None = None) -> str:
        """`uid:gid` of a user by the base's own list; a number stands for itself."""
        if name.isdecimal():
            return name
        listed = self.read("etc/passwd", _MOST_PASSWD_BYTES) if passwd is None else passwd
        if listed is None:
            raise WishInvalid(
                f"{image}: user: {name!r} cannot be looked up, its base has no /etc/passwd",
                'Give the number: `user: "1000"`.',
            )
        for line in listed.decode(errors="replace").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) >= 4 and all(f.isdecimal() for f in fields[2:4]):
                return f"{fields[2]}:{fields[3]}"
        raise WishInvalid(f"{image}: user: {name!r} is not in /etc/passwd of its base")

    def python_home(self, image: str, version: str, root: str) -> str:
        """The folder of the base's Python; an environment can only be put where none is."""
        self._require_room(image, root)
        if any(_MUSL.fullmatch(path) for path in self.rows):
            raise WishInvalid(f"{image}: python: its base has musl, wheels are locked for glibc")
        for folder in _PYTHON_FOLDERS:
            found, _ = follow(self.rows, f"{folder}/python{version}")
            row = self.rows.get(found)
            if row is not None and row.kind in (Kind.FILE.value, Kind.HARDLINK.value):
                return f"/{folder}"
        raise WishInvalid(
            f"{image}: python: its base has no python{version} in /usr/bin or /usr/local/bin",
            "Name the version that the base has under `python: version:`, or another base.",
        )

    def _require_room(self, image: str, root: str) -> None:
        if root in self.rows:
            raise WishInvalid(
                f"{image}: python: its base has /{root} already; two environments would mix",
                "Take a base without one, or add `files` only.",
            )
        for folder in parents(root):
            row = self.rows.get(folder)
            plain = (Kind.DIR.value, 0o755, 0, 0)
            if row is not None and (row.kind, row.mode, row.uid, row.gid) != plain:
                raise WishInvalid(
                    f"{image}: python: /{folder} of its base is a {row.kind} of mode"
                    f" {row.mode:04o}, owner {row.uid}:{row.gid}; wheels need a plain folder there"
                )
