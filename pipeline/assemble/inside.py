"""The files of a finished image, as a container sees them: found, listed and read."""

from __future__ import annotations

import difflib
import posixpath
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.assemble.entry import parents
from pipeline.assemble.image import Built
from pipeline.assemble.layer import read_file
from pipeline.assemble.view import View, follow, see
from pipeline.errors import UnknownFile
from pipeline.oci.record import FileRow, Kind, TitledLayer
from pipeline.store.store import Store

_MOST_NEAREST = 3
# a slip of the finger, or a version that moved on, but not another word
_LIKENESS = 0.7
_WILD = frozenset("*?[")


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
    """The bytes of a file; a path without a file at the root is looked for among the wheels'."""
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
    return read_file(store.blob_path(layer.record.digest), row)


def list_inside(store: Store, built: Built, path: str) -> list[FoundFile]:
    """What a folder holds, all that a pattern such as `*.so` matches, or one file."""
    view = _view(store, built)
    if _WILD & {*path}:
        return _matching(view, built, path)
    rows = {each: row for each, (_, row) in view.items()}
    # the root itself is in no layer
    name = locate(rows, built, path)[0] if path.strip("/.") else ""
    if name and rows[name].kind != Kind.DIR:
        return [_found(view, name)]
    return [_found(view, each, below) for each, below in sorted(_below(view, name).items())]


def _view(store: Store, built: Built) -> View[TitledLayer]:
    view = see((layer, store.contents(layer.record)) for layer in built.layers)
    # layers of a foreign base need not name the folders above their files
    for path, (layer, _) in list(view.items()):
        for folder in parents(path):
            if folder in view:
                break
            view[folder] = (layer, FileRow(folder, Kind.DIR, 0o755, 0, "", 0, "", ""))
    return view


def _below(view: View[TitledLayer], folder: str) -> dict[str, list[FileRow]]:
    """The entries of a folder, each with the files below it."""
    head = f"{folder}/" if folder else ""
    entries: defaultdict[str, list[FileRow]] = defaultdict(list)
    for path, (_, row) in view.items():
        if path.startswith(head) and path != folder:
            entry = head + path[len(head) :].partition("/")[0]
            entries[entry] += [row] if row.kind == Kind.FILE and path != entry else []
    return dict(entries)


def _matching(view: View[TitledLayer], built: Built, pattern: str) -> list[FoundFile]:
    # without a slash in front it may begin anywhere, as a shell's `find -path` has it
    whole = pattern if pattern.startswith("/") else f"*/{pattern}"
    names = sorted(path for path, (_, row) in view.items() if row.kind != Kind.DIR)
    found = [_found(view, name) for name in names if fnmatchcase(f"/{name}", whole)]
    if not found:
        hint = f"`*` stands for any part of a path. `{_listing(built, '/')}` lists folders."
        raise UnknownFile(f"{pattern}: no file of {built.name} matches", hint)
    return found


def _found(view: View[TitledLayer], path: str, below: Sequence[FileRow] = ()) -> FoundFile:
    layer, row = view[path]
    return FoundFile(
        path=f"/{path}",
        kind=row.kind,
        size_bytes=sum(each.size_bytes for each in below) if below else row.size_bytes,
        files=len(below),
        target=row.target,
        layer=layer.title,
    )


def locate(rows: Mapping[str, FileRow], built: Built, path: str) -> tuple[str, list[str]]:
    """Where a path leads in an image, and the links on it; else an error with the nearest paths."""
    places = (path, f"{built.plan.venv.site}/{path}") if path.strip("/") else (path,)
    tried = [follow(rows, each) for each in places]
    for name, links in tried:
        if name in rows:
            return name, links
    wanted = [name for name, _ in tried]
    near = [f"/{name}" for name in nearest(rows, wanted)]
    folder = next((f"/{each}" for each in parents(wanted[0]) if each in rows), "/")
    lists = f"`{_listing(built, folder)}` lists that folder."
    raise UnknownFile(
        f"/{wanted[0]}: no such file in {built.name}",
        f"The nearest: {', '.join(near)}. {lists}" if near else f"Give its whole path. {lists}",
    )


def _listing(built: Built, folder: str) -> str:
    """The command that lists a folder of just this image."""
    several = len(built.plan.spec.platforms) > 1
    command = f"sm120 image files {built.name} {folder}"
    return f"{command} --platform {built.platform}" if several else command


def nearest(paths: Collection[str], wanted: Sequence[str]) -> list[str]:
    """The paths that were most likely meant: a slip corrected, or the same name elsewhere."""
    children: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        folder, _, name = path.rpartition("/")
        children[folder].append(name)
    corrected = [each for path in wanted if (each := _corrected(children, path)) in paths]
    if corrected:
        return corrected[:_MOST_NEAREST]
    ends = posixpath.basename(wanted[0])
    same = [path for path in paths if posixpath.basename(path) == ends]
    return sorted(same, key=lambda p: (-_shared_end(p, wanted[0]), len(p), p))[:_MOST_NEAREST]


def _corrected(children: Mapping[str, list[str]], path: str) -> str:
    """A path with each part that is not there replaced by one like it; empty where none is."""
    reached = ""
    for part in path.split("/"):
        names = children.get(reached, [])
        like = [part] if part in names else difflib.get_close_matches(part, names, 1, _LIKENESS)
        if not like:
            return ""
        reached = f"{reached}/{like[0]}" if reached else like[0]
    return reached


def _shared_end(one: str, other: str) -> int:
    pairs = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(other.split("/")))
