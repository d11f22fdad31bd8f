"""The layers of a foreign base: read once, to know what they hold and that they are whole."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline import log
from pipeline.assemble.plan import foreign_key
from pipeline.assemble.view import OPAQUE, WHITEOUT
from pipeline.errors import BaseUnusable, CorruptArchive, HostileArchive, Interrupted
from pipeline.lock.model import BasePin, LayerPin
from pipeline.oci.record import FileRow, Kind, LayerRecord, TitledLayer, WrittenLayer
from pipeline.oci.tar_reader import TarStream, open_layer
from pipeline.store.store import Store

_MOST_READERS = 4


def read_layers(store: Store, pin: BasePin) -> None:
    """List what each layer holds, unless that was done before; each must have its diffID."""
    wanted = {layer.digest: layer for layer in pin.layers}
    missing = [x for x in wanted.values() if store.layer(foreign_key(x)) is None]
    if not missing:
        return
    total = sum(x.size_bytes for x in missing)
    title = f"Reading {log.count(len(missing), 'layer')} of {pin.repository}, {log.size(total)}"
    with (
        log.step(title),
        log.progress("read", total) as bar,
        ThreadPoolExecutor(min(_MOST_READERS, len(missing))) as pool,
    ):
        stop = threading.Event()

        def watch(n_bytes: int) -> None:
            if stop.is_set():
                raise Interrupted("stopped")
            bar.advance(n_bytes)

        try:
            list(pool.map(lambda layer: _read_layer(store, layer, watch), missing))
        except BaseException:
            # the other readers have gigabytes before them
            stop.set()
            raise


def base_layers(store: Store, pin: BasePin) -> list[TitledLayer]:
    """The layers as they are, from the bottom."""
    layers = []
    for number, layer in enumerate(pin.layers, 1):
        record = store.layer(foreign_key(layer))
        if record is None:
            raise BaseUnusable(f"{pin}: its layer {layer.digest} is gone from the store")
        layers.append(TitledLayer(title=layer_title(number), record=record))
    return layers


def layer_title(number: int) -> str:
    """What a person calls a layer of a foreign base."""
    return f"base layer {number}"


def _read_layer(store: Store, layer: LayerPin, watch: Callable[[int], None]) -> None:
    try:
        with open_layer(store.blob_path(layer.digest), layer.media_type, watch) as stream:
            rows = [row for entry in stream.entries() if (row := _row(stream, entry))]
    except (CorruptArchive, HostileArchive) as error:
        raise type(error)(f"{layer.digest}: {error}") from error
    if stream.diff_id != layer.diff_id:
        raise BaseUnusable(
            f"the layer {layer.digest} unpacks to {stream.diff_id}, but its config"
            f" names {layer.diff_id}"
        )
    record = LayerRecord(
        digest=layer.digest,
        diff_id=layer.diff_id,
        size_bytes=layer.size_bytes,
        unpacked_bytes=stream.unpacked_bytes,
        media_type=layer.media_type,
        is_foreign=True,
    )
    store.keep_layer(foreign_key(layer), WrittenLayer(record, rows))


def _row(stream: TarStream, entry: FileRow) -> FileRow | None:
    folder, _, name = entry.path.rpartition("/")
    if name.startswith(".wh."):
        return _taken_away(folder, name)
    if not entry.path:
        return None
    if entry.kind != Kind.FILE:
        return entry._replace(size_bytes=0)
    sha = hashlib.sha256()
    for piece in stream.content(entry):
        sha.update(piece)
    return entry._replace(sha256=sha.hexdigest())


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
