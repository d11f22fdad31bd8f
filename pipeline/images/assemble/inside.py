"""The files of a finished image, as a container sees them: found, listed and read."""

from __future__ import annotations

import difflib
import posixpath
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.artifacts.oci.record import FileRow, Kind, TitledLayer
from pipeline.artifacts.store.store import Store
from pipeline.core.errors import UnknownFile
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.layer import parents, read_layer_file
from pipeline.images.assemble.view import View, follow, see

_MOST_NEAREST = 3
# a slip of the finger, or a version that moved on, but not another word
_LIKENESS = 0.7


@dataclass(frozen=True)
class FoundFile:
    """A path of an image; of a folder, with the size and number of all files below it."""

    path: str
    kind: str
    size_bytes: int
    files: int
    target: str
    layer: str


def read_inside(store: Store, built: Built, path: str) -> bytes:
    """The bytes of a file; a path that the root lacks is looked up among the wheels' files."""
    view = _view(store, built)
    name, _ = locate({each: row for each, (_, row) in view.items()}, built, path)
    layer, row = view[name]
    if row.kind == Kind.HARDLINK:
        layer, row = view[row.target]
    if row.kind == Kind.DIR:
        raise UnknownFile(f"/{name}: is a folder", f"`{_listing(built, f'/{name}')}` lists it.")
    if row.kind != Kind.FILE or layer.record.is_foreign:
        what = "in its foreign base" if layer.record.is_foreign else f"a {row.kind}"
        raise UnknownFile(f"/{name}: is {what}", "Only files of layers made here are printed.")
    return read_layer_file(store.blob_path(layer.record.digest), row)


def list_inside(store: Store, built: Built, path: str) -> list[FoundFile]:
    """What a folder holds, all that a pattern such as `*.so` matches, or one file."""
    view = _view(store, built)
    rows = {each: row for each, (_, row) in view.items()}

    def found(name: str, below: Sequence[FileRow] = ()) -> FoundFile:
        row, size = rows[name], sum(each.size_bytes for each in below)
        title = view[name][0].title
        return FoundFile(
            f"/{name}", row.kind, size or row.size_bytes, len(below), row.target, title
        )

    if {"*", "?", "["} & {*path}:
        # without a slash in front it may begin anywhere, like the pattern of `find -path`
        whole = path if path.startswith("/") else f"*/{path}"
        names = sorted(each for each, row in rows.items() if row.kind != Kind.DIR)
        matching = [found(name) for name in names if fnmatchcase(f"/{name}", whole)]
        if not matching:
            hint = f"`*` stands for any part of a path. `{_listing(built, '/')}` lists folders."
            raise UnknownFile(f"{path}: no file of {built.name} matches", hint)
        return matching
    # the root itself is in no layer
    folder = locate(rows, built, path)[0] if path.strip("/.") else ""
    if folder and rows[folder].kind != Kind.DIR:
        return [found(folder)]
    head = f"{folder}/" if folder else ""
    entries: defaultdict[str, list[FileRow]] = defaultdict(list)
    for each, row in rows.items():
        if each.startswith(head) and each != folder:
            entry = head + each[len(head) :].partition("/")[0]
            entries[entry] += [row] if row.kind == Kind.FILE and each != entry else []
    return [found(each, below) for each, below in sorted(entries.items())]


def _view(store: Store, built: Built) -> View[TitledLayer]:
    view = see((layer, store.contents(layer.record)) for layer in built.layers)
    # layers of a foreign base need not name the folders above their files
    for path, (layer, _) in list(view.items()):
        for folder in parents(path):
            if folder in view:
                break
            view[folder] = (layer, FileRow(folder, Kind.DIR, 0o755, 0, "", 0, "", ""))
    return view


def locate(rows: Mapping[str, FileRow], built: Built, path: str) -> tuple[str, list[str]]:
    """Where a path leads in an image, and the links on it; else an error with the nearest paths."""
    places = (path, f"{built.plan.venv.site}/{path}") if path.strip("/") else (path,)
    tried = [follow(rows, each) for each in places]
    for name, links in tried:
        if name in rows:
            return name, links
    children: defaultdict[str, list[str]] = defaultdict(list)
    for each in rows:
        folder, _, name = each.rpartition("/")
        children[folder].append(name)
    near = []
    for wanted, _ in tried:
        # replaces each part that is missing by one like it
        reached = ""
        for part in wanted.split("/"):
            names = children.get(reached, [])
            like = [part] if part in names else difflib.get_close_matches(part, names, 1, _LIKENESS)
            if not like:
                break
            reached = f"{reached}/{like[0]}" if reached else like[0]
        else:
            near.append(reached)
    first = tried[0][0]
    if not near:
        # the same name elsewhere: those that share the longest end with it
        parts = first.split("/")[::-1]
        same = [each for each in rows if posixpath.basename(each) == parts[0]]
        ends = {each: posixpath.commonprefix([each.split("/")[::-1], parts]) for each in same}
        near = sorted(same, key=lambda p: (-len(ends[p]), len(p), p))
    folder = next((f"/{each}" for each in parents(first) if each in rows), "/")
    lists = f"`{_listing(built, folder)}` lists that folder."
    shown = ", ".join(f"/{name}" for name in near[:_MOST_NEAREST])
    hint = f"The nearest: {shown}. {lists}" if near else f"Give its whole path. {lists}"
    raise UnknownFile(f"/{first}: no such file in {built.name}", hint)


def _listing(built: Built, folder: str) -> str:
    """The command that lists a folder of just this image."""
    several = len(built.plan.spec.platforms) > 1
    command = f"sm120 image files {built.name} {folder}"
    return f"{command} --platform {built.platform}" if several else command
