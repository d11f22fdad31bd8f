"""Files out of finished layers into folders that a process can import from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.assemble.entry import Kind
from pipeline.assemble.layer import read_file
from pipeline.files import os_errors_explained
from pipeline.oci.record import FileRow, LayerRecord
from pipeline.store.store import Store

# Where a path of the image goes below the folder; none to leave it out.
Placing = Callable[[FileRow], str | None]


def unpack(store: Store, layers: Iterable[LayerRecord], place: Placing, folder: Path) -> int:
    """Write the files that `place` keeps, each checked by its hash; returns the bytes."""
    jobs: dict[str, tuple[LayerRecord, FileRow]] = {}
    for layer in layers:
        for row in store.contents(layer.digest):
            to = place(row) if row.kind in (Kind.FILE.value, Kind.SYMLINK.value) else None
            if to is not None:
                jobs[to] = (layer, row)
    with os_errors_explained(folder):
        for parent in sorted({(folder / to).parent for to in jobs}):
            parent.mkdir(parents=True, exist_ok=True)

        def write(to: str) -> int:
            layer, row = jobs[to]
            return _write(store, layer, row, folder / to)

        # the large libraries first, so that no core waits for the last one
        order = sorted(jobs, key=lambda to: -jobs[to][1].size_bytes)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return sum(pool.map(write, order))


def _write(store: Store, layer: LayerRecord, row: FileRow, path: Path) -> int:
    if row.kind == Kind.SYMLINK.value:
        if not row.target.startswith("/") and ".." not in row.target.split("/"):
            path.symlink_to(row.target)
        return 0
    path.write_bytes(read_file(store.blob_path(layer.digest), row))
    path.chmod(0o755 if row.mode & 0o111 else 0o644)
    return row.size_bytes
