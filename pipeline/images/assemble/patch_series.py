"""An image's series of patches: applied to the files of its wheels, refreshed, and extended."""

from __future__ import annotations

import csv
import io
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from pipeline.artifacts.oci.record import FileRow, Kind, LayerRecord
from pipeline.core.errors import PatchConflict, SpecInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import sha256_of
from pipeline.images.assemble import patch
from pipeline.images.assemble.layer import Entry
from pipeline.images.assemble.own_layers import WheelTree
from pipeline.images.assemble.plan import ImagePlan, LayerKind
from pipeline.images.assemble.venv import record_row
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import PatchedFile, PatchSpec
from pipeline.images.spec.new import with_hashes

_HINTS = {
    "before": "Redo the patch for this version and leave `before` out: `sm120 build IMAGE --accept`"
    " writes it.",
    "after": "After an intended edit: `sm120 build IMAGE --accept` writes the new hash.",
    "": "For a new patch: `sm120 build IMAGE --accept` writes it.",
}
# The lines that begin a file in a diff: git's own, or the two names that every diff has.
# Possessive: a line of two megabytes is read once, and not once more for each of its ends.
_BEGINS = re.compile(
    r"^diff --git a/(?P<git>\S++) b/\S++\n|^--- (?P<old>[^\t\n]++)[^\n]*+\n\+\+\+ [^\n]*+\n", re.M
)
# Each file is looked up in tables of 150,000 rows, once for every folder that its path begins with.
_MOST_FILES, _MOST_FOLDERS = 500, 40
_COPY = "Start from the image's own file: `sm120 image cat IMAGE PATH`; edit it, and name --of PATH"


@dataclass(frozen=True)
class Patched:
    """The top layer's entries, and the change as one diff for people."""

    entries: list[Entry]
    diff: str
    files: Mapping[str, bytes]  # every file of a wheel that this image or its bases changed


def patched_entries(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> Patched:
    """Applies the series to the files of the base; each file must be as promised."""
    tree = _on_patched_base(checkout, plan, tree)
    places: dict[str, tuple[LayerRecord, FileRow]] = {}
    originals: dict[str, bytes] = {}
    current: dict[str, bytes] = {}
    site, series = plan.venv.site, checkout.folder(plan.spec.name) / (plan.spec.patches or "")
    for spec in checkout.series(plan.spec).patches:
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
        promised = {f.path: f for f in spec.files}
        for name in promised:
            path = f"{site}/{name}"
            # a second patch of the same file starts from the result of the first one
            if path not in originals:
                places[path] = _require_file(tree, path, spec)
                current[path] = originals[path] = tree.read(*places[path])
        changes = patch.read_listed_patch(series.parent, spec.file, series.name)
        for name in sorted(promised.keys() - {change.path for change in changes}):
            message = f"{spec.file}: series.yaml lists {name}, which it does not change"
            hint = "Under `files`, list what the patch changes and nothing else."
            raise PatchConflict(message, hint)
        for change in changes:
            want, path = promised.get(change.path), f"{site}/{change.path}"
            if want is None:
                message = f"{spec.file}: changes {change.path}, which series.yaml does not list"
                hint = (
                    "List its `path` under `files`; `sm120 build IMAGE --accept` adds the hashes."
                )
                raise PatchConflict(message, hint)
            current[path] = patch.apply_promised(
                change, current[path], want, spec.file, "series.yaml", _HINTS
            )
    # patches that undo each other leave nothing to ship
    changed = {path: data for path, data in current.items() if data != originals[path]}
    entries = []
    for path, data in changed.items():
        row = places[path][1]
        entries.append(Entry(path, Kind.FILE, row.mode, data, owner=row.owner))
    # each touched wheel's RECORD, with true lines for the changed files
    lines = {path.removeprefix(f"{site}/"): data for path, data in changed.items()}
    owners = {places[path][1].owner: places[path][0] for path in changed}
    for owner, layer in sorted(owners.items()):
        # a layer of small wheels has a RECORD for each of them
        rows = tree.store.find_rows(layer, ".dist-info/RECORD")
        row = next(r for r in rows if r.owner == owner)
        text = corrected(tree.read(layer, row).decode(), lines)
        entries.append(Entry(row.path, Kind.FILE, row.mode, text.encode(), owner=owner))
    names = sorted(lines)
    diff = "".join(patch.unified(x, originals[f"{site}/{x}"], lines[x]) for x in names)
    written = {e.path: e.content for e in entries if isinstance(e.content, bytes)}
    return Patched(entries, diff, {**tree.patched, **written})


def _on_patched_base(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> WheelTree:
    """The wheels with the patches of the images below, unless an own wheel replaces the file."""
    if plan.base is None:
        return tree
    own = sum(layer.kind is LayerKind.WHEELS for layer in plan.layers)
    at = len(tree.layers) - own
    lower, upper = replace(tree, layers=tree.layers[:at]), replace(tree, layers=tree.layers[at:])
    changed = patched_entries(checkout, plan.base, lower).files
    return replace(tree, patched={path: x for path, x in changed.items() if not upper.find(path)})


def _require_file(tree: WheelTree, path: str, spec: PatchSpec) -> tuple[LayerRecord, FileRow]:
    place = tree.find(path)
    if place is None:
        raise PatchConflict(f"{spec.file}: /{path} is in no wheel of this image")
    return place


def corrected(record: str, changed: dict[str, bytes]) -> str:
    """A RECORD whose lines for changed files are true."""
    out = []
    for line in record.splitlines(keepends=True):
        # paths with commas are quoted; all other lines stay byte for byte
        path = next(csv.reader(io.StringIO(line)))[0]
        out.append(record_row(path, changed[path]) if path in changed else line)
    return "".join(out)


def refresh_series(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> None:
    """After an intended edit of a patch: writes the new hashes of its files into series.yaml."""
    if plan.spec.patches is None:
        return
    path = checkout.folder(plan.spec.name) / plan.spec.patches
    tree = _on_patched_base(checkout, plan, tree)
    current: dict[str, bytes] = {}
    hashes: dict[tuple[int, int], dict[str, str]] = {}
    for number, spec in enumerate(checkout.series(plan.spec).patches):
        files = {file.path: at for at, file in enumerate(spec.files)}
        for change in patch.read_listed_patch(path.parent, spec.file, path.name):
            if change.path not in files:
                continue
            at, is_known = files[change.path], change.path in current
            new = hashes.setdefault((number, at), {})
            if is_known:
                data = current[change.path]
            else:
                data = tree.read(*_require_file(tree, f"{plan.venv.site}/{change.path}", spec))
            # the hash of upstream's file stays as promised; the result of an earlier patch changed
            if (is_known or spec.files[at].before is None) and not new:
                new["before"] = sha256_of(data)
            current[change.path] = patch.apply(change, data, spec.file)
            new["after"] = sha256_of(current[change.path])
    text = path.read_bytes().decode()
    write_bytes(path, with_hashes(text, hashes).encode())


@dataclass(frozen=True)
class NewPatch:
    """A change as a diff against installed files, and its entry in the series."""

    text: str
    files: tuple[PatchedFile, ...]
    applies_to: str
    left_out: tuple[str, ...]  # files of the diff that are in no wheel of the image


@dataclass(frozen=True)
class Installed:
    """The files of an image's wheels, as its base and its own series leave them."""

    plan: ImagePlan
    tree: WheelTree

    def find(self, path: str) -> str | None:
        """The installed path that a path in some repository stands for: `python/pkg/a.py`."""
        site = self.plan.venv.site
        parts = path.lstrip("/").removeprefix(f"{site}/").split("/")
        if len(parts) > _MOST_FOLDERS:
            return None
        tails = ("/".join(parts[n:]) for n in range(len(parts)))
        return next((tail for tail in tails if self.tree.find(f"{site}/{tail}")), None)

    def read(self, path: str) -> tuple[bytes, str]:
        """A file that `find` found, and `project==version` of its wheel."""
        place = self.tree.find(f"{self.plan.venv.site}/{path}")
        pin = self.plan.find_wheel(place[1].owner) if place else None
        assert place is not None
        assert pin is not None
        return self.tree.read(*place), f"{pin.name}=={pin.version}"


def installed_files(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> Installed:
    """The files that a new patch starts from."""
    changed = patched_entries(checkout, plan, tree).files
    return Installed(plan, WheelTree(tree.store, tree.layers, changed))


def new_patch(files: Installed, data: bytes, name: str, of: str = "") -> NewPatch:
    """A patch from a diff, whatever folder its paths begin with, or from an edited copy.

    `of` names the only file of a diff, or the file that was copied.
    """
    text, begins, after_git = data.decode(errors="replace"), list[re.Match[str]](), False
    for match in _BEGINS.finditer(text):
        # after git's own line, the two names are of the same file
        if match["git"] or not after_git:
            begins.append(match)
        after_git = bool(match["git"])
    parts = []  # each file of the diff by its path, with the lines about it
    for begin, end in zip(begins, [*(m.start() for m in begins[1:]), len(text)], strict=False):
        old = (begin["old"] or "").strip()
        bare = old[2:] if old.startswith(("a/", "b/")) else old
        parts.append((begin["git"] or bare, text[begin.start() : end]))
    if of and len(parts) > 1:
        raise PatchConflict(f"{name}: changes {len(parts)} files", "Leave --of out.")
    if len(parts) > _MOST_FILES:
        hint = "A change of that size is a version of its own: lock another wheel."
        raise PatchConflict(f"{name}: changes {len(parts)} files, more than {_MOST_FILES}", hint)
    if not of and not parts:
        raise PatchConflict(f"{name}: is not a unified diff", _COPY)
    applies_to, left_out = "", list[str]()
    made: dict[str, tuple[str, PatchedFile]] = {}
    for path, part in parts or [(of, "")]:
        real = files.find(of or path)
        if real is None:
            left_out.append(of or path)
            continue
        before, owner = files.read(real)
        if part:
            names = re.search(r"^--- (.*)\n\+\+\+ (.*)\n", part, re.M)
            # for files that come, go, or are not text, the parser gives the reason to refuse them
            if names is not None and "/dev/null" not in names[0]:
                part = f"{part[: names.start()]}--- a/{real}\n+++ b/{real}\n{part[names.end() :]}"
            (change,) = patch.parse(part, name)
            after = patch.apply(change, before, name)
        elif data == before:
            raise PatchConflict(f"{name}: is the same as {real} in the image", _COPY)
        else:
            after = data
        try:
            diff = patch.unified(real, before, after)
        except UnicodeDecodeError as error:
            hint = "Patches change text only."
            raise PatchConflict(f"{name}: {real} is not text", hint) from error
        hashes = {"before": sha256_of(before), "after": sha256_of(after)}
        made[real] = (diff, PatchedFile(path=real, **hashes))
        applies_to = applies_to or owner
    if not made:
        listed = ", ".join(path[:200] for path in left_out[:4])
        listed += " …" if len(left_out) > 4 else ""
        image, base = files.plan.spec.name, posixpath.basename(left_out[0])
        hint = f"Give the path as it is installed: `sm120 image files {image} '*{base}'` finds it."
        raise PatchConflict(f"{name}: no wheel of the image has {listed}", hint)
    whole, entries = "".join(x for x, _ in made.values()), tuple(x for _, x in made.values())
    return NewPatch(whole, entries, applies_to, tuple(left_out))
