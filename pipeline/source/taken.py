"""A layer that another machine compiled, kept as if it had been compiled in this store."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path

from pipeline import log
from pipeline.assemble.plan import TreePlan
from pipeline.errors import LayerRefused
from pipeline.files import os_errors_explained
from pipeline.oci.record import LayerRecord
from pipeline.source.compiled import CompiledTree, tree_path, write_outputs
from pipeline.store.store import Store


def keep_taken(
    store: Store, plan: TreePlan, blob: Path, record: LayerRecord, tree: CompiledTree
) -> LayerRecord:
    """Unpack the files that the spec declares, pack them again, and keep the layer if it is equal.

    Equal bytes prove that the layer holds these files and nothing else, with the modes and in the
    order of one that is compiled here; and the table of its contents is our own.
    """
    places = {f"{plan.build.to.strip('/')}/{x.to}": x.source for x in plan.outputs}
    files: dict[str, Path] = {}
    with store.scratch() as folder, log.step(f"Checking the files of {plan.title}"):
        with os_errors_explained(folder):
            try:
                with tarfile.open(blob, "r:gz") as layer:
                    for member in layer:
                        if member.name not in places or not member.isfile():
                            continue
                        # a stated size that is not true must not fill the disk
                        content = layer.extractfile(member)
                        if content is None or member.size > record.unpacked_bytes:
                            break
                        path = folder / str(len(files))
                        with path.open("wb") as out:
                            shutil.copyfileobj(content, out)
                        files[places[member.name]] = path
            except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
                message = f"{plan.title}: {record.digest} is no layer that can be read ({error})"
                raise LayerRefused(message) from error
        if absent := sorted({*places.values()} - {*files}):
            raise LayerRefused(f"{plan.title}: {record.digest} holds no {absent[0]}")
        written = write_outputs(store, plan, files, record.digest)
    # before the layer gets its key, as when it is compiled
    store.write(tree_path(store, plan.key), tree.dump())
    return store.keep_layer(plan.key, written)
