"""A change to an image's files as a patch of its series: from a diff, or from an edited copy."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.assemble import patch
from pipeline.assemble.own_layers import WheelTree, patched_entries
from pipeline.assemble.plan import ImagePlan
from pipeline.errors import PatchConflict
from pipeline.model import sha256_of
from pipeline.spec.checkout import Checkout
from pipeline.spec.image import PatchedFile

# The lines that begin a file in a diff: git's own, or the two names that every diff has.
# Possessive: a line of two megabytes is read once, and not once more for each of its ends.
_BEGINS = re.compile(
    r"^diff --git a/(?P<git>\S++) b/\S++\n|^--- (?P<old>[^\t\n]++)[^\n]*+\n\+\+\+ [^\n]*+\n", re.M
)
# Each file is looked up in tables of 150,000 rows, once for every folder that its path begins with.
_MOST_FILES, _MOST_FOLDERS = 500, 40
_COPY = "Start from the image's own file: `sm120 image cat IMAGE PATH`; edit it, and name --of PATH"


@dataclass(frozen=True)
class NewPatch:
    """What a change becomes: the diff against installed files, and what a series says of it."""

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
        parts = path.lstrip("/").removeprefix(f"{self.plan.venv.site}/").split("/")
        if len(parts) > _MOST_FOLDERS:
            return None
        tails = ("/".join(parts[n:]) for n in range(len(parts)))
        return next((tail for tail in tails if self.tree.find(self._place(tail))), None)

    def read(self, path: str) -> bytes:
        place = self.tree.find(self._place(path))
        assert place is not None
        return self.tree.read(*place)

    def owner(self, path: str) -> str:
        """`project==version` of the wheel that a file is of."""
        place = self.tree.find(self._place(path))
        pin = self.plan.find_wheel(place[1].owner) if place else None
        assert pin is not None
        return f"{pin.name}=={pin.version}"

    def _place(self, path: str) -> str:
        return f"{self.plan.venv.site}/{path}"


def installed(checkout: Checkout, plan: ImagePlan, tree: WheelTree) -> Installed:
    """The files that a new patch starts from."""
    left = patched_entries(checkout, plan, tree).left
    return Installed(plan, WheelTree(tree.store, tree.layers, left))


def from_diff(files: Installed, text: str, name: str, of: str = "") -> NewPatch:
    """A patch from a diff, whatever folder its paths begin with; `of` names its only file."""
    parts = list(_parts(text))
    if not parts:
        raise PatchConflict(f"{name}: is not a unified diff", _COPY)
    if of and len(parts) > 1:
        raise PatchConflict(f"{name}: changes {len(parts)} files", "Leave --of out.")
    if len(parts) > _MOST_FILES:
        raise PatchConflict(
            f"{name}: changes {len(parts)} files, more than {_MOST_FILES}",
            "A change of that size is a version of its own: lock another wheel.",
        )
    changed: dict[str, tuple[bytes, bytes]] = {}
    left_out: list[str] = []
    for path, part in parts:
        real = files.find(of or path)
        if real is None:
            left_out.append(of or path)
            continue
        before = files.read(real)
        (change,) = patch.parse(_renamed(part, real), name)
        changed[real] = (before, patch.apply(change, before, name))
    if not changed:
        raise _not_there(files, name, left_out)
    return _made(files, changed, left_out)


def from_copy(files: Installed, data: bytes, name: str, of: str) -> NewPatch:
    """A patch from an edited copy of one file."""
    real = files.find(of)
    if real is None:
        raise _not_there(files, name, [of])
    before = files.read(real)
    if data == before:
        raise PatchConflict(f"{name}: is the same as {real} in the image", _COPY)
    try:
        before.decode(), data.decode()
    except UnicodeDecodeError as error:
        raise PatchConflict(f"{name}: {real} is not text", "Patches change text only.") from error
    return _made(files, {real: (before, data)}, [])


def is_diff(text: str) -> bool:
    """Whether a text is a diff, and not a file that was edited."""
    return any(True for _ in _parts(text))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Each file of a diff by its path, with the lines about it."""
    begins = list(_BEGINS.finditer(text))
    # after git's own line, the two names are of the same file
    own = [m for before, m in zip([None, *begins], begins, strict=False) if not _goes_on(before, m)]
    ends = [*(m.start() for m in own[1:]), len(text)]
    for begin, end in zip(own, ends, strict=False):
        yield begin["git"] or _bare(begin["old"].strip()), text[begin.start() : end]


def _goes_on(before: re.Match[str] | None, here: re.Match[str]) -> bool:
    return before is not None and bool(before["git"]) and not here["git"]


def _bare(path: str) -> str:
    return path[2:] if path.startswith(("a/", "b/")) else path


def _renamed(part: str, path: str) -> str:
    """The lines about one file, with the path that it has in the image."""
    names = re.search(r"^--- (.*)\n\+\+\+ (.*)\n", part, re.M)
    # files that come, go, or are not text: the parser says why they are refused
    if names is None or "/dev/null" in names[0]:
        return part
    return f"{part[: names.start()]}--- a/{path}\n+++ b/{path}\n{part[names.end() :]}"


def _made(
    files: Installed, changed: dict[str, tuple[bytes, bytes]], left_out: Sequence[str]
) -> NewPatch:
    return NewPatch(
        "".join(patch.unified(path, *both) for path, both in changed.items()),
        tuple(
            PatchedFile(path=path, before=sha256_of(before), after=sha256_of(after))
            for path, (before, after) in changed.items()
        ),
        files.owner(next(iter(changed))),
        tuple(left_out),
    )


def _not_there(files: Installed, name: str, paths: Sequence[str]) -> PatchConflict:
    listed = ", ".join(path[:200] for path in paths[:4]) + (" …" if len(paths) > 4 else "")
    return PatchConflict(
        f"{name}: no wheel of the image has {listed}",
        "Give the path as it is installed:"
        f" `sm120 image files {files.plan.spec.name} '*{posixpath.basename(paths[0])}'` finds it.",
    )
