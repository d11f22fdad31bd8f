"""A foreign base in the store: its layers, read once, its files, its config, users and Python."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from pipeline.artifacts.oci.config import ImageConfig, read_image_config
from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord, TitledLayer, WrittenLayer
from pipeline.artifacts.oci.tar_reader import TarStream, open_layer
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.images.assemble.layer import parents
from pipeline.images.assemble.plan import ImagePlan, foreign_key
from pipeline.images.assemble.view import OPAQUE, WHITEOUT, View, follow, see
from pipeline.images.lock.make import GLIBC_MINOR
from pipeline.images.lock.model import BasePin, LayerPin

_MOST_READERS = 4
# a list of users has a few kilobytes
_MOST_PASSWD_BYTES = 1 << 20
# PyPI's manylinux wheels need glibc; Alpine and its like have musl.
_MUSL = re.compile(r"(usr/)?lib/ld-musl-[a-z0-9_]+\.so\.1")
# glibc has carried its version in this name up to 2.33; newer ones do not
_OLD_GLIBC = re.compile(r"(?:usr/)?lib(?:64)?/(?:[a-z0-9_-]+/)?libc-2\.(\d+)\.so")
# Debian's own, and that of the official Python images
_PYTHON_FOLDERS = ("usr/bin", "usr/local/bin")


def read_layers(store: Store, pin: BasePin) -> None:
    """Lists what each layer holds, unless that was done before; each must have its diffID."""
    wanted = {layer.digest: layer for layer in pin.layers}
    missing = [x for x in wanted.values() if store.layer(foreign_key(x)) is None]
    if not missing:
        return
    total, stop = sum(x.size_bytes for x in missing), threading.Event()
    title = f"Reading {log.count(len(missing), 'layer')} of {pin.repository}, {log.size(total)}"
    with (
        log.step(title),
        log.progress("read", total) as bar,
        ThreadPoolExecutor(min(_MOST_READERS, len(missing))) as pool,
    ):

        def watch(n_bytes: int) -> None:
            if stop.is_set():
                raise errors.Interrupted("stopped")
            bar.advance(n_bytes)

        try:
            list(pool.map(lambda layer: _read_layer(store, layer, watch), missing))
        except BaseException:
            # the other readers have gigabytes before them
            stop.set()
            raise


def _read_layer(store: Store, layer: LayerPin, watch: Callable[[int], None]) -> None:
    try:
        with open_layer(store.blob_path(layer.digest), layer.media_type, watch) as stream:
            rows = [row for entry in stream.entries() if (row := _row(stream, entry))]
    except (errors.CorruptArchive, errors.HostileArchive) as error:
        raise type(error)(f"{layer.digest}: {error}") from error
    if stream.diff_id != layer.diff_id:
        raise errors.BaseUnusable(
            f"the layer {layer.digest} unpacks to {stream.diff_id}, but its config"
            f" names {layer.diff_id}"
        )
    n_bytes = stream.unpacked_bytes
    record = LayerRecord(**layer.model_dump(), unpacked_bytes=n_bytes, is_foreign=True)
    store.keep_layer(foreign_key(layer), WrittenLayer(record, rows))


def _row(stream: TarStream, entry: FileRow) -> FileRow | None:
    """An entry with its hash; of a whiteout, the path it removes or the folder it empties."""
    folder, _, name = entry.path.rpartition("/")
    if name == ".wh..wh..opq":
        return FileRow(folder, OPAQUE, 0, 0, "", 0, "", "")
    # the root itself, and entries that aufs keeps for its own use
    if not entry.path or name.startswith(".wh..wh."):
        return None
    if name.startswith(".wh."):
        hidden = name.removeprefix(".wh.")
        if hidden in ("", ".", ".."):
            raise errors.HostileArchive(f"the whiteout {folder}/{name} removes no file")
        path = f"{folder}/{hidden}" if folder else hidden
        return FileRow(path, WHITEOUT, 0, 0, "", 0, "", "")
    if entry.kind != Kind.FILE:
        return entry._replace(size_bytes=0)
    sha = hashlib.sha256()
    for piece in stream.content(entry):
        sha.update(piece)
    return entry._replace(sha256=sha.hexdigest())


def base_layers(store: Store, pin: BasePin) -> list[TitledLayer]:
    """The layers as they are, from the bottom."""
    layers = []
    for number, layer in enumerate(pin.layers, 1):
        record = store.layer(foreign_key(layer))
        if record is None:
            raise errors.BaseUnusable(f"{pin}: its layer {layer.digest} is gone from the store")
        layers.append(TitledLayer(title=f"base layer {number}", record=record))
    return layers


@dataclass(frozen=True)
class Foreign:
    """A locked base whose layers were read."""

    store: Store
    pin: BasePin

    @cached_property
    def config(self) -> ImageConfig:
        return read_image_config(self.store.read_blob(self.pin.config.digest))

    @cached_property
    def view(self) -> View[LayerRecord]:
        """Its files as a container sees them."""
        layers = [x.record for x in base_layers(self.store, self.pin)]
        return see((record, self.store.contents(record)) for record in layers)

    @cached_property
    def rows(self) -> dict[str, FileRow]:
        return {path: row for path, (_, row) in self.view.items()}

    def read(self, path: str, most_bytes: int) -> bytes | None:
        """A small file, links followed; none where there is no such file."""
        real, _ = follow(self.rows, path)
        if real not in self.view:
            return None
        record, row = self.view[real]
        if row.kind == Kind.HARDLINK:
            real = row.target
        with open_layer(self.store.blob_path(record.digest), record.media_type) as stream:
            # to the layer's end: a later entry of the same name wins, and the diffID is known
            data = None
            for header in stream.entries():
                if header.path == real and header.kind == Kind.FILE:
                    if header.size_bytes > most_bytes:
                        message = f"/{real} is too large: {header.size_bytes} bytes"
                        raise errors.BaseUnusable(f"{self.pin}: {message}")
                    data = b"".join(stream.content(header))
        if stream.diff_id != record.diff_id:
            raise errors.StoreDamaged(
                f"the layer {record.digest} of {self.pin} does not match its diffID"
            )
        return data

    def user(self, image: str, name: str, passwd: bytes | None = None) -> str:
        """`uid:gid` of a user by the base's own list; a number stands for itself."""
        # numbers need no entry in /etc/passwd, as in Docker
        if name.isdecimal():
            return name
        listed = self.read("etc/passwd", _MOST_PASSWD_BYTES) if passwd is None else passwd
        if listed is None:
            message = f"{image}: user: {name!r} cannot be looked up, its base has no /etc/passwd"
            raise errors.SpecInvalid(message, 'Give the number: `user: "1000"`.')
        for line in listed.decode(errors="replace").splitlines():
            fields = line.split(":")
            if fields[0] == name and len(fields) >= 4 and all(f.isdecimal() for f in fields[2:4]):
                return f"{fields[2]}:{fields[3]}"
        raise errors.SpecInvalid(f"{image}: user: {name!r} is not in /etc/passwd of its base")

    def python_home(self, image: str, version: str, root: str) -> str:
        """The folder of the base's Python; the base must have glibc, and no environment yet."""
        what = f"{image}: python"
        if root in self.rows:
            message = f"{what}: its base has /{root} already; two environments would mix"
            raise errors.SpecInvalid(message, "Use a base without one, or add `files` only.")
        for folder in parents(root):
            row = self.rows.get(folder)
            # a layer writes the folders above its files anew, and would change their mode and owner
            plain = (Kind.DIR, 0o755, 0, 0)
            if row is not None and (row.kind, row.mode, row.uid, row.gid) != plain:
                raise errors.SpecInvalid(
                    f"{what}: /{folder} of its base is a {row.kind} of mode {row.mode:04o},"
                    f" owner {row.uid}:{row.gid}; wheels need a plain folder there"
                )
        for path in self.rows:
            if _MUSL.fullmatch(path):
                raise errors.SpecInvalid(f"{what}: its base has musl, wheels are locked for glibc")
            old = _OLD_GLIBC.fullmatch(path)
            if old and int(old[1]) < GLIBC_MINOR:
                need = f"wheels are locked for 2.{GLIBC_MINOR}"
                raise errors.SpecInvalid(f"{what}: its base has glibc 2.{old[1]}, {need}")
        for folder in _PYTHON_FOLDERS:
            program, _ = follow(self.rows, f"{folder}/python{version}")
            row = self.rows.get(program)
            if row is not None and row.kind in (Kind.FILE, Kind.HARDLINK):
                return f"/{folder}"
        message = f"{what}: its base has no python{version} in /usr/bin or /usr/local/bin"
        hint = "Name the version that the base has under `python: version:`, or another base."
        raise errors.SpecInvalid(message, hint)


def require_fit(store: Store, plans: Sequence[ImagePlan]) -> None:
    """Refuses wheels that a foreign base has no place or no Python for, before they are fetched."""
    for plan in plans:
        if plan.foreign:
            base = Foreign(store, plan.foreign)
            for each in plan.chain():
                if each.spec.python:
                    base.python_home(each.spec.name, each.venv.version, each.venv.root)
