"""A file of a finished image, as a container sees it."""

from __future__ import annotations

from pipeline.assemble.image import Built
from pipeline.assemble.layer import read_file
from pipeline.assemble.view import follow, see
from pipeline.errors import UnknownImage
from pipeline.oci.record import Kind
from pipeline.store.store import Store


def read_inside(store: Store, built: Built, path: str) -> bytes:
    """The bytes of a file; a path without a file at the root is looked for among the wheels'."""
    view = see((x.record, store.contents(x.record)) for x in built.layers)
    rows = {name: row for name, (_, row) in view.items()}
    tried = [follow(rows, each)[0] for each in (path, f"{built.plan.venv.site}/{path}")]
    name = next((each for each in tried if each in view), None)
    if name is None:
        raise UnknownImage(f"/{tried[0]}: no such file in the image", "Give its whole path.")
    layer, row = view[name]
    if row.kind == Kind.HARDLINK:
        layer, row = view[row.target]
    if row.kind != Kind.FILE or layer.is_foreign:
        what = "in its foreign base" if layer.is_foreign else f"a {row.kind}"
        raise UnknownImage(f"/{name}: is {what}", "Only files of layers made here are printed.")
    return read_file(store.blob_path(layer.digest), row)
