"""The two thin layers that belong to one image: what it adds itself, and its patches."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pipeline.assemble import patch
from pipeline.assemble.cuda import cuda_home
from pipeline.assemble.entry import Entry, parents
from pipeline.assemble.foreign import Foreign
from pipeline.assemble.layer import read_file
from pipeline.assemble.overlap import misplaced
from pipeline.assemble.plan import ImagePlan, LayerKind
from pipeline.assemble.venv import record_row
from pipeline.assemble.view import see
from pipeline.errors import PatchConflict, SpecInvalid
from pipeline.files import write_bytes
from pipeline.model import sha256_of
from pipeline.oci.record import FileRow, Kind, LayerRecord
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import PatchSpec
from pipeline.spec.series_text import with_hashes
from pipeline.store.store import Store


@dataclass(frozen=True)
class WheelTree:
    """The wheel layers of an image, seen as one tree: the last layer that has a path wins."""

    store: Store
    layers: Sequence[LayerRecord]
    patched: Mapping[str, bytes] = field(default_factory=dict)  # as a base's patches left them

    @cached_property
    def contents(self) -> tuple[list[FileRow], ...]:
        """Every layer's whole table; what only a few files are needed of, asks `find`."""
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
        return read_file(self.store.blob_path(layer.digest), row)

    def paths(self) -> list[str]:
        return [r.path for rows in self.contents for r in rows if r.kind == Kind.FILE]


def own_entries(
    checkout: Checkout, plan: ImagePlan, tree: WheelTree, foreign: Foreign | None = None
) -> list[Entry]:
    """The environment's skeleton, the CUDA home, our files, and winners that would be hidden."""
    spec = plan.spec
    entries: list[Entry] = []
    if spec.python:
        entries += plan.venv.skeleton(*_python_home(plan, foreign))
        for claim in misplaced(tree.contents, spec.python.prefer):
            data = tree.read(tree.layers[claim.layer], claim.row)
            row = claim.row
            entries.append(Entry(row.path, Kind.FILE, row.mode, data, owner=row.owner))
    if spec.cuda:
        sources = [f"{plan.venv.site}/{s}" for s in spec.cuda.sources]
        entries += cuda_home(tree.paths(), spec.cuda.home, sources, plan.architecture)
    for file in spec.files:
        source = checkout.folder(spec.name) / file.source
        mode = int(file.mode, 8)
        entries.append(
            Entry(file.to.lstrip("/"), Kind.FILE, mode, source.read_bytes(), owner=spec.name)
        )
    return entries


def _python_home(plan: ImagePlan, foreign: Foreign | None) -> list[str]:
    """Where a foreign base has its Python; ours is where it always is."""
    if foreign is None:
        return []
    return [foreign.python_home(plan.spec.name, plan.venv.version, plan.venv.root)]


def folders_above(
    entries: Sequence[Entry], below: Sequence[list[FileRow]], plan: ImagePlan
) -> list[Entry]:
    """The folders that entries lie in, as the layers below have them.

    A layer replaces what it names: a folder written anew would lose its mode and owner, and one
    written over a link, such as /bin, would hide all that is behind it.
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
        # rows of our own layers do not record owners; homes are all that is not root's
        uid, gid = (home.uid, home.gid) if home else (row.uid, row.gid)
        above.append(Entry(path, Kind.DIR, row.mode, uid=uid, gid=gid))
    for entry in entries:
        _require_replaceable(plan.spec.name, entry, known.get(entry.path))
    return above


def _require_replaceable(name: str, entry: Entry, below: FileRow | None) -> None:
    """A file of ours may replace a file, a link only a link, nothing a folder."""
    allowed = {Kind.FILE, Kind.HARDLINK, Kind.SYMLINK}
    if entry.kind is Kind.SYMLINK:
        allowed = {Kind.SYMLINK}
    if below is not None and below.kind not in allowed:
        owner = below.owner or "its base"
        raise SpecInvalid(f"{name}: would replace /{entry.path}, a {below.kind} of {owner}")


@dataclass(frozen=True)
class Patched:
    """The top layer's entries, and the change as one diff for people."""

    entries: list[Entry]
    diff: str
    left: Mapping[str, bytes]  # every file of a wheel that this image or its bases changed


def patched_entries(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> Patched:
    """Apply the series to the files as the base left them; each file must be as promised."""
    tree = _as_base_left_it(checkout, plan, tree)
    originals: dict[str, tuple[LayerRecord, FileRow, bytes]] = {}
    current: dict[str, bytes] = {}
    site = plan.venv.site
    for spec in checkout.series(plan.spec).patches:
        _require_version(plan, spec)
        for promised in spec.files:
            path = f"{site}/{promised.path}"
            # a second patch of the same file starts from what the first one left
            if path not in originals:
                layer, row = _require_file(tree, path, spec)
                originals[path] = (layer, row, tree.read(layer, row))
                current[path] = originals[path][2]
        _apply(checkout, plan, spec, site, current)
    # patches that undo each other leave nothing to ship
    changed = {path: data for path, data in current.items() if data != originals[path][2]}
    entries = [
        Entry(path, Kind.FILE, originals[path][1].mode, data, owner=originals[path][1].owner)
        for path, data in changed.items()
    ]
    entries += _records(
        tree, {originals[p][1].owner: originals[p][0] for p in changed}, changed, site
    )
    diff = "".join(
        patch.unified(path.removeprefix(f"{site}/"), originals[path][2], data)
        for path, data in sorted(changed.items())
    )
    written = {e.path: e.content for e in entries if isinstance(e.content, bytes)}
    return Patched(entries, diff, {**tree.patched, **written})


def _as_base_left_it(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> WheelTree:
    """The wheels with the patches of the images below, unless an own wheel replaces the file."""
    if plan.base is None:
        return tree
    own = sum(layer.kind is LayerKind.WHEELS for layer in plan.layers)
    lower = replace(tree, layers=tree.layers[: len(tree.layers) - own])
    upper = replace(tree, layers=tree.layers[len(tree.layers) - own :])
    left = patched_entries(checkout, plan.base, lower).left
    return replace(tree, patched={path: x for path, x in left.items() if not upper.find(path)})


def _require_version(plan: ImagePlan, spec: PatchSpec) -> None:
    try:
        wanted = Requirement(spec.applies_to)
    except InvalidRequirement as error:
        raise SpecInvalid(f"{spec.file}: applies_to: {error}") from error
    pin = plan.find_wheel(canonicalize_name(wanted.name))
    # a lock may name a pre-release
    if pin is None or not wanted.specifier.contains(pin.version, prereleases=True):
        got = f"{pin.name} {pin.version}" if pin else f"no {wanted.name}"
        raise PatchConflict(
            f"{spec.file}: is for {spec.applies_to}, the lock has {got}",
            "Redo it for the locked version, and name that under `applies_to` in series.yaml.",
        )


def _require_file(tree: WheelTree, path: str, spec: PatchSpec) -> tuple[LayerRecord, FileRow]:
    place = tree.find(path)
    if place is None:
        raise PatchConflict(f"{spec.file}: /{path} is in no wheel of this image")
    return place


def _apply(
    checkout: Checkout, plan: ImagePlan, spec: PatchSpec, site: str, current: dict[str, bytes]
) -> None:
    series = checkout.folder(plan.spec.name) / (plan.spec.patches or "")
    text = _patch_text(series.parent / spec.file)
    promised = {f.path: f for f in spec.files}
    changes = patch.parse(text, spec.file)
    for path in sorted(promised.keys() - {change.path for change in changes}):
        raise PatchConflict(
            f"{spec.file}: series.yaml lists {path}, which it does not change",
            "Under `files`, list what the patch changes and nothing else.",
        )
    for change in changes:
        if change.path not in promised:
            raise PatchConflict(
                f"{spec.file}: changes {change.path}, which series.yaml does not list",
                "List its `path` under `files`; `sm120 build IMAGE --accept` adds the hashes.",
            )
        path = f"{site}/{change.path}"
        want = promised[change.path]
        _require_digest(spec, change.path, "before", want.before, current[path])
        current[path] = patch.apply(change, current[path], spec.file)
        _require_digest(spec, change.path, "after", want.after, current[path])


def refresh_series(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> None:
    """After an intended edit of a patch: write what its files now become into series.yaml."""
    if plan.spec.patches is None:
        return
    path = checkout.folder(plan.spec.name) / plan.spec.patches
    tree = _as_base_left_it(checkout, plan, tree)
    current: dict[str, bytes] = {}
    hashes: dict[tuple[int, int], dict[str, str]] = {}
    for number, spec in enumerate(checkout.series(plan.spec).patches):
        files = {file.path: at for at, file in enumerate(spec.files)}
        for change in patch.parse(_patch_text(path.parent / spec.file), spec.file):
            if change.path not in files:
                continue
            at = files[change.path]
            new = hashes.setdefault((number, at), {})
            # what upstream published stays as promised; what an earlier patch gives has changed
            data = _before(tree, plan, spec, change.path, current)
            if (change.path in current or spec.files[at].before is None) and not new:
                new["before"] = sha256_of(data)
            current[change.path] = patch.apply(change, data, spec.file)
            new["after"] = sha256_of(current[change.path])
    text = path.read_bytes().decode()
    write_bytes(path, with_hashes(text, hashes).encode())


def _before(
    tree: WheelTree, plan: ImagePlan, spec: PatchSpec, path: str, current: dict[str, bytes]
) -> bytes:
    """A file as the earlier patches left it, else as its wheel has it."""
    if path in current:
        return current[path]
    return tree.read(*_require_file(tree, f"{plan.venv.site}/{path}", spec))


def _patch_text(path: Path) -> str:
    try:
        # read_text would turn every \r\n into \n
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchConflict(
            f"{path.name}: cannot be read ({error})",
            "`file` in series.yaml names a file of text beside it.",
        ) from error


_HINTS = {
    "before": "Redo the patch for this version and leave `before` out: `sm120 build IMAGE --accept`"
    " writes it.",
    "after": "After an intended edit: `sm120 build IMAGE --accept` writes the new hash.",
}


def _require_digest(
    spec: PatchSpec, path: str, when: Literal["before", "after"], want: str | None, data: bytes
) -> None:
    got = sha256_of(data)
    if want is None:
        raise PatchConflict(
            f"{spec.file}: series.yaml has no hash of {path} {when} the patch",
            "For a new patch: `sm120 build IMAGE --accept` writes it.",
        )
    if got != want:
        raise PatchConflict(
            f"{spec.file}: {path} {when} the patch is {got}, series.yaml has {want}", _HINTS[when]
        )


def _records(
    tree: WheelTree, owners: dict[str, LayerRecord], changed: dict[str, bytes], site: str
) -> list[Entry]:
    """Each touched wheel's RECORD, with true lines for the changed files."""
    lines = {path.removeprefix(f"{site}/"): data for path, data in changed.items()}
    entries = []
    for owner, layer in sorted(owners.items()):
        rows = tree.store.find_rows(layer, ".dist-info/RECORD")
        # a layer of small wheels has a RECORD for each of them
        row = next(r for r in rows if r.owner == owner)
        text = tree.read(layer, row).decode()
        entries.append(
            Entry(row.path, Kind.FILE, row.mode, corrected(text, lines).encode(), owner=owner)
        )
    return entries


def corrected(record: str, changed: dict[str, bytes]) -> str:
    """A RECORD whose lines for changed files are true."""
    out = []
    for line in record.splitlines(keepends=True):
        # paths with commas are quoted; all other lines stay byte for byte
        path = next(csv.reader(io.StringIO(line)))[0]
        out.append(record_row(path, changed[path]) if path in changed else line)
    return "".join(out)
