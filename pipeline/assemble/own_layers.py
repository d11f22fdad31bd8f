"""The two thin layers that belong to one image: what it adds itself, and its patches."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pipeline.assemble import patch
from pipeline.assemble.cuda import cuda_home
from pipeline.assemble.entry import Entry, Kind, parents
from pipeline.assemble.foreign import Foreign
from pipeline.assemble.layer import read_file
from pipeline.assemble.overlap import misplaced
from pipeline.assemble.plan import ImagePlan
from pipeline.assemble.view import see
from pipeline.assemble.wheel import record_row
from pipeline.errors import PatchConflict, WishInvalid
from pipeline.files import write_bytes
from pipeline.model import sha256_of
from pipeline.oci.record import FileRow, LayerRecord
from pipeline.spec.image import PatchWish
from pipeline.spec.load import Checkout
from pipeline.store.store import Store


@dataclass(frozen=True)
class WheelTree:
    """The wheel layers of an image, seen as one tree: the last layer that has a path wins."""

    store: Store
    layers: tuple[LayerRecord, ...]

    @cached_property
    def contents(self) -> tuple[list[FileRow], ...]:
        """Every layer's whole table; what only a few files are needed of, asks `find`."""
        return tuple(self.store.contents(layer.digest) for layer in self.layers)

    def find(self, path: str) -> tuple[LayerRecord, FileRow] | None:
        for layer in reversed(self.layers):
            for row in self.store.find_rows(layer.digest, path):
                if row.path == path:
                    return layer, row
        return None

    def read(self, layer: LayerRecord, row: FileRow) -> bytes:
        return read_file(self.store.blob_path(layer.digest), row)

    def paths(self) -> list[str]:
        return [r.path for rows in self.contents for r in rows if r.kind == Kind.FILE.value]


def wheel_tree(store: Store, layers: Sequence[LayerRecord]) -> WheelTree:
    """Some layers of the store as one tree."""
    return WheelTree(store, tuple(layers))


def own_entries(
    checkout: Checkout, plan: ImagePlan, tree: WheelTree, foreign: Foreign | None = None
) -> list[Entry]:
    """The environment's skeleton, the CUDA home, our files, and winners that would be hidden."""
    wish = plan.wish
    entries: list[Entry] = []
    if wish.python:
        entries += plan.venv.skeleton(*_python_home(plan, foreign))
        for claim in misplaced(tree.contents, wish.python.prefer):
            data = tree.read(tree.layers[claim.layer], claim.row)
            row = claim.row
            entries.append(Entry(row.path, Kind.FILE, row.mode, data, owner=row.owner))
    if wish.cuda:
        sources = [f"{plan.venv.site}/{s}" for s in wish.cuda.sources]
        entries += cuda_home(tree.paths(), wish.cuda.home, sources, plan.architecture)
    for file in wish.files:
        source = checkout.folder(wish.name) / file.source
        mode = int(file.mode, 8)
        entries.append(
            Entry(file.to.lstrip("/"), Kind.FILE, mode, source.read_bytes(), owner=wish.name)
        )
    return entries


def _python_home(plan: ImagePlan, foreign: Foreign | None) -> list[str]:
    """Where a foreign base has its Python; ours is where it always is."""
    if foreign is None:
        return []
    return [foreign.python_home(plan.wish.name, plan.venv.version, plan.venv.root)]


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
    homes = {a.home.strip("/"): a for p in plan.chain() for a in p.wish.accounts}
    found = []
    for path in sorted(folders & known.keys()):
        row, home = known[path], homes.get(path)
        if row.kind != Kind.DIR.value:
            raise WishInvalid(f"{plan.wish.name}: puts a file below /{path}, a {row.kind}")
        uid, gid = (home.uid, home.gid) if home else (row.uid, row.gid)
        found.append(Entry(path, Kind.DIR, row.mode, uid=uid, gid=gid))
    for entry in entries:
        _require_replaceable(plan.wish.name, entry, known.get(entry.path))
    return found


def _require_replaceable(name: str, entry: Entry, below: FileRow | None) -> None:
    """A file of ours may replace a file, a link only a link, nothing a folder."""
    allowed = {Kind.FILE.value, Kind.HARDLINK.value, Kind.SYMLINK.value}
    if entry.kind is Kind.SYMLINK:
        allowed = {Kind.SYMLINK.value}
    if below is not None and below.kind not in allowed:
        owner = below.owner or "its base"
        raise WishInvalid(f"{name}: would hide /{entry.path}, a {below.kind} of {owner}")


@dataclass(frozen=True)
class Patched:
    """The top layer's entries, and the change as one diff for people."""

    entries: list[Entry]
    diff: str


def patched_entries(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> Patched:
    """Apply the series to the files as the wheels have them; each file must be as promised."""
    originals: dict[str, tuple[LayerRecord, FileRow, bytes]] = {}
    current: dict[str, bytes] = {}
    site = plan.venv.site
    for wish in checkout.series(plan.wish).patches:
        _require_version(plan, wish)
        for promised in wish.files:
            path = f"{site}/{promised.path}"
            if path not in originals:
                layer, row = _require_file(tree, path, wish)
                originals[path] = (layer, row, tree.read(layer, row))
                current[path] = originals[path][2]
        _apply(checkout, plan, wish, site, current)
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
    return Patched(entries, diff)


def _require_version(plan: ImagePlan, wish: PatchWish) -> None:
    try:
        wanted = Requirement(wish.applies_to)
    except InvalidRequirement as error:
        raise WishInvalid(f"{wish.file}: applies_to: {error}") from error
    name = canonicalize_name(wanted.name)
    pin = next((w for w in plan.lock.wheels if w.name == name), None)
    if pin is None or not wanted.specifier.contains(pin.version, prereleases=True):
        got = f"{pin.name} {pin.version}" if pin else f"no {wanted.name}"
        raise PatchConflict(f"{wish.file}: is for {wish.applies_to}, the lock has {got}")


def _require_file(tree: WheelTree, path: str, wish: PatchWish) -> tuple[LayerRecord, FileRow]:
    found = tree.find(path)
    if found is None:
        raise PatchConflict(f"{wish.file}: /{path} is in no wheel of this image")
    return found


def _apply(
    checkout: Checkout, plan: ImagePlan, wish: PatchWish, site: str, current: dict[str, bytes]
) -> None:
    series = checkout.folder(plan.wish.name) / (plan.wish.patches or "")
    text = _patch_text(series.parent / wish.file)
    promised = {f.path: f for f in wish.files}
    changes = patch.parse(text, wish.file)
    for path in sorted(promised.keys() - {change.path for change in changes}):
        raise PatchConflict(f"{wish.file}: series.yaml says it changes {path}, it does not")
    for change in changes:
        if change.path not in promised:
            raise PatchConflict(f"{wish.file}: changes {change.path}, series.yaml does not say so")
        path = f"{site}/{change.path}"
        want = promised[change.path]
        _require_digest(wish, change.path, "before", want.before, current[path])
        current[path] = patch.apply(change, current[path], wish.file)
        _require_digest(wish, change.path, "after", want.after, current[path])


def refresh_series(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> None:
    """After an intended edit of a patch: write what its files now become into series.yaml."""
    if plan.wish.patches is None:
        return
    path = checkout.folder(plan.wish.name) / plan.wish.patches
    text = path.read_text(encoding="utf-8")
    current: dict[str, bytes] = {}
    for wish in checkout.series(plan.wish).patches:
        for change in patch.parse(_patch_text(path.parent / wish.file), wish.file):
            want = next((f for f in wish.files if f.path == change.path), None)
            if want is None:
                continue
            place = f"{plan.venv.site}/{change.path}"
            if change.path not in current:
                current[change.path] = tree.read(*_require_file(tree, place, wish))
            current[change.path] = patch.apply(change, current[change.path], wish.file)
            text = text.replace(want.after, sha256_of(current[change.path]))
    write_bytes(path, text.encode())


def _patch_text(path: Path) -> str:
    try:
        # read_text would turn every \r\n into \n
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise PatchConflict(f"{path.name}: cannot be read ({error})") from error


def _require_digest(wish: PatchWish, path: str, when: str, want: str, data: bytes) -> None:
    got = sha256_of(data)
    if got != want:
        raise PatchConflict(
            f"{wish.file}: {path} {when} the patch is {got}, series.yaml says {want}",
            "After an intended edit: `sm120 build IMAGE --accept` writes the new hash.",
        )


def _records(
    tree: WheelTree, owners: dict[str, LayerRecord], changed: dict[str, bytes], site: str
) -> list[Entry]:
    """Each touched wheel's RECORD, with true lines for the changed files."""
    lines = {path.removeprefix(f"{site}/"): data for path, data in changed.items()}
    entries = []
    for owner, layer in sorted(owners.items()):
        rows = tree.store.find_rows(layer.digest, ".dist-info/RECORD")
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
        path = next(csv.reader(io.StringIO(line)))[0]
        out.append(record_row(path, changed[path]) if path in changed else line)
    return "".join(out)
