"""Unified diffs, applied exactly: the stated line, the stated words, or not at all."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pipeline.errors import PatchConflict

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


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


def parse(text: str, name: str) -> list[FilePatch]:
    """Read a unified diff with a/ and b/ paths."""
    lines = text.splitlines(keepends=True)
    patches: list[FilePatch] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("--- "):
            at += 1
            continue
        path = _target(lines, at, name)
        at += 2
        hunks: list[Hunk] = []
        while at < len(lines) and lines[at].startswith("@@"):
            hunk, at = _hunk(lines, at, name)
            hunks.append(hunk)
        if not hunks:
            raise PatchConflict(f"{name}: no hunks for {path}")
        patches.append(FilePatch(path, tuple(hunks)))
    if not patches:
        raise PatchConflict(f"{name}: is not a unified diff")
    return patches


def _target(lines: list[str], at: int, name: str) -> str:
    old = lines[at][4:].split("\t")[0].strip()
    new = lines[at + 1][4:].split("\t")[0].strip() if at + 1 < len(lines) else ""
    if not old.startswith("a/") or not new.startswith("b/") or old[2:] != new[2:]:
        raise PatchConflict(f"{name}: patches change files in place, not {old} → {new}")
    return old[2:]


def _hunk(lines: list[str], at: int, name: str) -> tuple[Hunk, int]:
    found = _HUNK.match(lines[at])
    if not found:
        raise PatchConflict(f"{name}: damaged hunk header {lines[at].strip()!r}")
    start, old_count, _, new_count = (int(g) if g else 1 for g in found.groups())
    before: list[str] = []
    after: list[str] = []
    at += 1
    while len(before) < old_count or len(after) < new_count:
        if at >= len(lines) or lines[at][:1] not in " +-":
            raise PatchConflict(f"{name}: the hunk at line {start} ends early")
        sign, words = lines[at][0], lines[at][1:]
        at += 1
        if at < len(lines) and lines[at].startswith("\\"):
            words, at = words.rstrip("\n"), at + 1
        before += [words] if sign in " -" else []
        after += [words] if sign in " +" else []
    if len(before) != old_count or len(after) != new_count:
        raise PatchConflict(f"{name}: the hunk at line {start} counts its lines wrongly")
    return Hunk(start, tuple(before), tuple(after)), at


def apply(patch: FilePatch, before: bytes, name: str) -> bytes:
    """The file after the patch; every hunk must match exactly where it says."""
    try:
        lines = before.decode().splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise PatchConflict(f"{name}: {patch.path} is not text") from error
    out: list[str] = []
    at = 0
    for hunk in patch.hunks:
        first = max(hunk.start - 1, 0)
        if first < at:
            raise PatchConflict(f"{name}: hunks of {patch.path} overlap at line {hunk.start}")
        found = tuple(lines[first : first + len(hunk.before)])
        if found != hunk.before:
            raise PatchConflict(_difference(patch.path, hunk, found, name))
        out += lines[at:first]
        out += hunk.after
        at = first + len(hunk.before)
    return "".join([*out, *lines[at:]]).encode()


def _difference(path: str, hunk: Hunk, found: tuple[str, ...], name: str) -> str:
    """Which line is not as the patch expects."""
    for offset, want in enumerate(hunk.before):
        got = found[offset] if offset < len(found) else "the end of the file"
        if got != want:
            line = hunk.start + offset
            return f"{name}: {path} line {line} is {got.strip()!r}, expected {want.strip()!r}"
    return f"{name}: {path} does not match at line {hunk.start}"


def unified(path: str, before: bytes, after: bytes) -> str:
    """The applied change as a diff for people."""
    return "".join(
        difflib.unified_diff(
            before.decode().splitlines(keepends=True),
            after.decode().splitlines(keepends=True),
            f"a/{path}",
            f"b/{path}",
        )
    )
