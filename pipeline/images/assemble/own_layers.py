"""The files that an image adds itself: its environment, a CUDA home of links, files of the spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import PathConflict, SpecInvalid
from pipeline.images.assemble.foreign import Foreign
from pipeline.images.assemble.layer import Entry, link_to, parents, read_layer_file
from pipeline.images.assemble.plan import ImagePlan
from pipeline.images.assemble.venv import misplaced
from pipeline.images.assemble.view import see
from pipeline.images.spec.checkout import Checkout

_TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
# Folders that get links of our own, and `bin`: nvcc looks for lib64 beside the folder it is in.
_ALWAYS_MADE = ("bin", "lib", "lib/stubs")
# NVIDIA's wheels hold `libcudart.so.12`, not the `libcudart.so` that -lcudart asks for
_VERSIONED = re.compile(r"^(lib[\w+.-]+?\.so)\.\d[\d.]*$")
_LEAVE_OUT = "Leave one of the folders under `cuda: from:` out."

# A file is None.
Tree = dict[str, "Tree | None"]


@dataclass(frozen=True)
class WheelTree:
    """The wheel layers of an image, seen as one tree: the last layer that has a path wins."""

    store: Store
    layers: Sequence[LayerRecord]
    patched: Mapping[str, bytes] = field(default_factory=dict)  # as a base's patches changed them

    @cached_property
    def contents(self) -> tuple[list[FileRow], ...]:
        """Every layer's whole table; `find` is for a few files."""
        return tuple(self.store.contents(layer) for layer in self.layers)

    def find(self, path: str) -> tuple[LayerRecord, FileRow] | None:
        for layer in reversed(self.layers):
            # a search in the table's text: 150,000 rows are not parsed for one
            for row in self.store.find_rows(layer, path):
                if row.path == path:
                    return layer, row
        return None

    def read(self, layer: LayerRecord, row: FileRow) -> bytes:
        if row.path in self.patched:
            return self.patched[row.path]
        return read_layer_file(self.store.blob_path(layer.digest), row)


def own_entries(
    checkout: Checkout, plan: ImagePlan, tree: WheelTree, foreign: Foreign | None = None
) -> list[Entry]:
    """The environment's skeleton, the CUDA home, our files, and winners that would be hidden."""
    spec, venv, entries = plan.spec, plan.venv, list[Entry]()
    if spec.python:
        # of a foreign base; our own has its Python in /usr/bin
        homes = [foreign.python_home(spec.name, venv.version, venv.root)] if foreign else []
        entries += venv.skeleton(*homes)
        for position, row in misplaced(tree.contents, spec.python.prefer):
            data = tree.read(tree.layers[position], row)
            entries.append(Entry(row.path, Kind.FILE, row.mode, data, owner=row.owner))
    if spec.cuda:
        paths = [r.path for rows in tree.contents for r in rows if r.kind == Kind.FILE]
        sources = [f"{venv.site}/{s}" for s in spec.cuda.sources]
        if plan.slim:
            # its compiler's folder may have gone with the compiler
            sources = [s for s in sources if any(path.startswith(f"{s}/") for path in paths)]
        entries += cuda_home(paths, spec.cuda.home, sources, plan.architecture)
    for file in spec.files:
        data = (checkout.folder(spec.name) / file.source).read_bytes()
        path, mode = file.to.lstrip("/"), int(file.mode, 8)
        entries.append(Entry(path, Kind.FILE, mode, data, owner=spec.name))
    return entries


def cuda_home(
    paths: Sequence[str], home: str, sources: Sequence[str], architecture: str
) -> list[Entry]:
    """Links below `home` to every file of the source folders, merged; the first source wins.

    A folder that only one source has becomes one link; a folder that several have is made, and
    its contents linked. Linkers want `libX.so`, wheels ship `libX.so.N`: that link is added.
    `lib64` is where nvcc and build files look; `stubs/libcuda.so` leads to the driver's library,
    which is there once a GPU is given to the container.
    """
    trees: list[tuple[str, Tree]] = []
    for source in sources:
        root, prefix = Tree(), source.rstrip("/") + "/"
        for path in (p for p in paths if p.startswith(prefix)):
            *folders, name = path.removeprefix(prefix).split("/")
            node = root
            for folder in folders:
                inner = node.setdefault(folder, {})
                if inner is None:
                    message = f"/{path}: lies below {folder}, which is a file"
                    raise PathConflict(message, _LEAVE_OUT)
                node = inner
            node.setdefault(name, None)
        # a folder that moved in a new release of the wheels would leave an empty CUDA home
        if not root:
            raise SpecInvalid(f"cuda: from: no wheel has anything below {source}")
        trees.append((source, root))
    entries: list[Entry] = []
    top = home.strip("/")
    _merge(top, "", trees, entries)
    taken = {entry.path for entry in entries}
    driver = f"/usr/lib/{_TRIPLETS[architecture]}/libcuda.so.1"
    more = [link_to(f"{top}/lib64", "lib"), link_to(f"{top}/lib/stubs/libcuda.so", driver)]
    return entries + [entry for entry in more if entry.path not in taken]


def _merge(at: str, below: str, trees: list[tuple[str, Tree]], out: list[Entry]) -> None:
    names = sorted({name for _, tree in trees for name in tree})
    for name in names:
        inner = [(source, tree[name]) for source, tree in trees if name in tree]
        folders = [(source, tree) for source, tree in inner if tree is not None]
        if folders and len(folders) < len(inner):
            message = f"/{at}/{name}: is a file in one CUDA folder, a folder in another"
            raise PathConflict(message, _LEAVE_OUT)
        # one link for a whole folder where that suffices: headers alone are thousands of files
        if len(folders) > 1 or (folders and f"{below}{name}" in _ALWAYS_MADE):
            _merge(f"{at}/{name}", f"{below}{name}/", folders, out)
        else:
            out.append(link_to(f"{at}/{name}", f"/{inner[0][0]}/{below}{name}"))
    taken = set(names)
    for name in names:
        match = _VERSIONED.match(name)
        if match and match[1] not in taken:
            taken.add(match[1])
            out.append(link_to(f"{at}/{match[1]}", name))


def folders_above(
    entries: Sequence[Entry], below: Sequence[list[FileRow]], plan: ImagePlan
) -> list[Entry]:
    """The folders that entries lie in, as the layers below have them.

    A layer replaces what it names: a folder written anew would lose its mode and owner, and one
    written over a link, such as /bin, would hide all that the link leads to. So our files may
    replace files, our links only links, and neither may replace a folder.
    """
    folders = {parent for entry in entries for parent in parents(entry.path)}
    folders -= {entry.path for entry in entries}
    known = {path: row for path, (_, row) in see((None, rows) for rows in below).items()}
    homes = {a.home.strip("/"): a for p in plan.chain() for a in p.spec.accounts}
    above = []
    for path in sorted(folders & known.keys()):
        row, home = known[path], homes.get(path)
        if row.kind != Kind.DIR:
            raise SpecInvalid(f"{plan.spec.name}: puts a file below /{path}, a {row.kind}")
        # rows of our own layers do not record owners; only homes are not root's
        uid, gid = (home.uid, home.gid) if home else (row.uid, row.gid)
        above.append(Entry(path, Kind.DIR, row.mode, uid=uid, gid=gid))
    for entry in (entry for entry in entries if entry.path in known):
        old, links = known[entry.path], {Kind.SYMLINK}
        allowed = links if entry.kind is Kind.SYMLINK else links | {Kind.FILE, Kind.HARDLINK}
        if old.kind not in allowed:
            what = f"/{entry.path}, a {old.kind} of {old.owner or 'its base'}"
            raise SpecInvalid(f"{plan.spec.name}: would replace {what}")
    return above
