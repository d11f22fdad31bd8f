"""Unified diffs, applied exactly: at the stated line, to the stated text, or not at all."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import PatchConflict
from pipeline.core.model import sha256_of
from pipeline.images.spec.image import PatchedFile
from pipeline.images.spec.source import SourcePatchedFile

# a count that is left out is 1
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.ASCII)
# What git writes for changes that a unified diff cannot show.
_NOT_IN_PLACE = (
    *("GIT binary patch", "Binary files ", "new file mode ", "deleted file mode "),
    *("old mode ", "rename from ", "copy from "),
)
_IN_PLACE = "Patches change installed text; `files` in image.yaml adds a file."
_AGAIN = "Make the diff again with `git diff` or `diff -u`."
# The next file, or the signature that git format-patch ends with.
_AFTER_HUNK = ("--- ", "-- \n")


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines that must be there, and the lines that replace them."""

    start: int  # 1-based line in the file before
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """All hunks of one file."""

    path: str
    hunks: tuple[Hunk, ...]


def _lines(text: str) -> list[str]:
    """Lines as diff counts them: only a line feed ends one, a form feed does not."""
    *whole, last = text.split("\n")
    return [f"{line}\n" for line in whole] + ([last] if last else [])


def read_listed_patch(folder: Path, name: str, listed_in: str) -> list[FilePatch]:
    """A patch that a series.yaml or source.yaml of the folder lists."""
    try:
        # read_text would turn every \r\n into \n
        text = (folder / name).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        hint = f"`file` in {listed_in} names a file of text beside it."
        raise PatchConflict(f"{name}: cannot be read ({error})", hint) from error
    return parse(text, name)


def apply_promised(
    change: FilePatch,
    data: bytes,
    want: PatchedFile | SourcePatchedFile,
    name: str,
    listed_in: str,
    hints: dict[str, str],
) -> bytes:
    """The file after the patch; before and after it must have the hashes that are listed."""
    for when, digest in (("before", want.before), ("after", want.after)):
        if when == "after":
            data = apply(change, data, name)
        if (got := sha256_of(data)) != digest:
            what = f"{name}: {change.path} {when} the patch is {got}, {listed_in} has"
            raise PatchConflict(
                f"{what} {digest or 'no hash of it'}", hints[when if digest else ""]
            )
    return data


def parse(text: str, name: str) -> list[FilePatch]:
    """Reads a unified diff with a/ and b/ paths."""
    lines, patches, at = _lines(text), list[FilePatch](), 0
    while at < len(lines):
        if lines[at].startswith(_NOT_IN_PLACE):
            message = f"{name}: patches change text in place, not {lines[at].strip()!r}"
            raise PatchConflict(message, _IN_PLACE)
        # mail headers, `diff --git` and `index` lines hold nothing that is needed
        if not lines[at].startswith("--- "):
            at += 1
            continue
        # diff -u puts a time after a tab
        old = lines[at][4:].split("\t")[0].strip()
        below = lines[at + 1] if at + 1 < len(lines) else ""
        new = below[4:].split("\t")[0].strip() if below.startswith("+++ ") else "nothing"
        if not old.startswith("a/") or not new.startswith("b/") or old[2:] != new[2:]:
            message = f"{name}: patches change files in place, not {old} → {new}"
            raise PatchConflict(message, _IN_PLACE)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            match = _HUNK.match(lines[at])
            if not match:
                raise PatchConflict(f"{name}: damaged hunk header {lines[at].strip()!r}", _AGAIN)
            start, old_count, _, new_count = (int(g) if g else 1 for g in match.groups())
            where = f"{name}: the hunk at line {start}"
            before, after = list[str](), list[str]()
            at += 1
            while len(before) < old_count or len(after) < new_count:
                if at >= len(lines) or lines[at][:1] not in " +-":
                    raise PatchConflict(f"{where} ends early", _AGAIN)
                sign, line = lines[at][0], lines[at][1:]
                at += 1
                # "\ No newline at end of file" is about the line before it
                if at < len(lines) and lines[at].startswith("\\"):
                    line, at = line.rstrip("\n"), at + 1
                before += [line] if sign in " -" else []
                after += [line] if sign in " +" else []
            rest = lines[at] if at < len(lines) else "\n"
            goes_on = rest[0] in " +-\\" and not rest.startswith(_AFTER_HUNK)
            if len(before) != old_count or len(after) != new_count or goes_on:
                raise PatchConflict(f"{where} counts its lines wrongly", _AGAIN)
            if not all(line.endswith("\n") for line in before[:-1] + after[:-1]):
                raise PatchConflict(f"{where} ends the file in its middle", _AGAIN)
            hunks.append(Hunk(start, tuple(before), tuple(after)))
        if not hunks:
            raise PatchConflict(f"{name}: no hunks for {old[2:]}", _AGAIN)
        patches.append(FilePatch(old[2:], tuple(hunks)))
    if not patches:
        raise PatchConflict(f"{name}: is not a unified diff", _AGAIN)
    return patches


def apply(patch: FilePatch, before: bytes, name: str) -> bytes:
    """The file after the patch; every hunk must match exactly at its line."""
    what = f"{name}: {patch.path}"
    try:
        lines = _lines(before.decode())
    except UnicodeDecodeError as error:
        raise PatchConflict(f"{what} is not text") from error
    out: list[str] = []
    at = 0
    for hunk in patch.hunks:
        # a hunk that only adds names the line it comes after
        first = hunk.start - 1 if hunk.before else hunk.start
        # hunks come in the order of their lines
        if first < at:
            message = f"{name}: hunks of {patch.path} overlap at line {hunk.start}"
            raise PatchConflict(message, _AGAIN)
        # no fuzz and no offset: a patch that fits elsewhere may do something else there
        current = tuple(lines[first : first + len(hunk.before)])
        if current != hunk.before or first > len(lines):
            for offset, want in enumerate(hunk.before):
                got = current[offset] if offset < len(current) else "the end of the file"
                if got != want:
                    line = f"line {hunk.start + offset} is {got.strip()!r}"
                    raise PatchConflict(f"{what} {line}, expected {want.strip()!r}")
            raise PatchConflict(f"{what} does not match at line {hunk.start}")
        out += [*lines[at:first], *hunk.after]
        at = first + len(hunk.before)
        if at < len(lines) and hunk.after and not hunk.after[-1].endswith("\n"):
            raise PatchConflict(f"{what} does not end at line {hunk.start}")
    return "".join([*out, *lines[at:]]).encode()


def unified(path: str, before: bytes, after: bytes) -> str:
    """The applied change as a diff for people."""
    old, new = _lines(before.decode()), _lines(after.decode())
    return "".join(difflib.unified_diff(old, new, f"a/{path}", f"b/{path}"))
