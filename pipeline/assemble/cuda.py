"""A CUDA home made of links, so that nvcc from NVIDIA's wheels works where tools look for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pipeline.assemble.entry import Entry
from pipeline.errors import PathConflict, SpecInvalid
from pipeline.oci.record import Kind

_TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
# Folders that get links of our own, and `bin`: nvcc looks for lib64 beside the folder it is in.
_ALWAYS_MADE = ("bin", "lib", "lib/stubs")
# NVIDIA's wheels hold `libcudart.so.12`, not the `libcudart.so` that -lcudart asks for
_VERSIONED = re.compile(r"^(lib[\w+.-]+?\.so)\.\d[\d.]*$")


def cuda_home(
    paths: Iterable[str], home: str, sources: Sequence[str], architecture: str
) -> list[Entry]:
    """Links below `home` to every file of the source folders, merged; the first source wins.

    A folder that only one source has becomes one link; a folder that several have is made, and
    its contents linked. Linkers want `libX.so`, wheels ship `libX.so.N`: that link is added.
    `lib64` is where nvcc and build files look; `stubs/libcuda.so` leads to the driver's library,
    which is there once a GPU is given to the container.
    """
    paths, root = list(paths), home.strip("/")
    trees = [_tree(paths, source) for source in sources]
    for source, tree in zip(sources, trees, strict=True):
        # a folder that moved in a new release of the wheels would leave an empty CUDA home
        if not tree:
            raise SpecInvalid(f"cuda: from: no wheel has anything below {source}")
    entries: list[Entry] = []
    _merge(root, "", list(zip(sources, trees, strict=True)), entries)
    taken = {entry.path for entry in entries}
    driver = f"/usr/lib/{_TRIPLETS[architecture]}/libcuda.so.1"
    more = [_link(f"{root}/lib64", "lib"), _link(f"{root}/lib/stubs/libcuda.so", driver)]
    return entries + [entry for entry in more if entry.path not in taken]


Tree = dict[str, "Tree | None"]


def _tree(paths: Iterable[str], source: str) -> Tree:
    """The files below a folder as nested dicts; a file is None."""
    root: Tree = {}
    prefix = source.rstrip("/") + "/"
    for path in paths:
        if not path.startswith(prefix):
            continue
        *folders, name = path.removeprefix(prefix).split("/")
        here = root
        for folder in folders:
            here = _inner(here, folder, path)
        here.setdefault(name, None)
    return root


def _inner(tree: Tree, folder: str, path: str) -> Tree:
    inner = tree.setdefault(folder, {})
    if inner is None:
        raise PathConflict(
            f"/{path}: lies below {folder}, which is a file",
            "Leave one of the folders under `cuda: from:` out.",
        )
    return inner


def _merge(at: str, below: str, trees: list[tuple[str, Tree]], out: list[Entry]) -> None:
    names = sorted({name for _, tree in trees for name in tree})
    for name in names:
        inner = [(source, tree[name]) for source, tree in trees if name in tree]
        folders = [(source, tree) for source, tree in inner if tree is not None]
        if folders and len(folders) < len(inner):
            raise PathConflict(
                f"/{at}/{name}: is a file in one CUDA folder, a folder in another",
                "Leave one of the folders under `cuda: from:` out.",
            )
        # one link for a whole folder where that suffices: headers alone are thousands of files
        if len(folders) > 1 or (folders and f"{below}{name}" in _ALWAYS_MADE):
            _merge(f"{at}/{name}", f"{below}{name}/", folders, out)
        else:
            out.append(_link(f"{at}/{name}", f"/{inner[0][0]}/{below}{name}"))
    taken = {n for _, tree in trees for n in tree}
    for name in names:
        match = _VERSIONED.match(name)
        if match and match[1] not in taken:
            taken.add(match[1])
            out.append(_link(f"{at}/{match[1]}", name))


def _link(path: str, target: str) -> Entry:
    return Entry(path, Kind.SYMLINK, 0o777, target=target)
