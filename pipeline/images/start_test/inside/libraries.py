"""Which shared libraries the programs of an image ask for and where the loader finds them.

Runs inside an image; standard library only. It reads the files as the loader would, and loads none:
what needs the driver cannot be loaded on a machine that has none.
https://man7.org/linux/man-pages/man8/ld.so.8.html
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_MAGIC64 = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEAD = struct.Struct("<16xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS, _SONAME, _RPATH, _RUNPATH = 1, 5, 14, 15, 29
_MOST_BYTES = 1 << 20
_LONGEST_TEXT = 1 << 16  # of an RPATH
_PACKAGES = "/site-packages/"
_HIDDEN = ("/proc", "/sys", "/dev")


class Needs(NamedTuple):
    """What one program or library asks the loader for."""

    path: str
    machine: int
    soname: str
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]


def read_needs(path: Path) -> Needs | None:
    """Reads the needs of a file; none where it is not linked dynamically."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MAGIC64):
                return None
            _, machine, _, _, start, *_, size, count, _, _, _ = _HEAD.unpack(head)
            file.seek(start)
            table = file.read(size * count)
            segments = [_SEGMENT.unpack_from(table, at) for at in range(0, len(table), size)]
            # no such segment: the file is not linked dynamically
            dynamic = next(s for s in segments if s[0] == _DYNAMIC)
            file.seek(dynamic[2])
            data = file.read(min(dynamic[5], _MOST_BYTES))
            entries = [_ENTRY.unpack_from(data, n) for n in range(0, len(data) - 15, 16)]
            values = dict(reversed(entries))
            address = values[_STRINGS]
            # the table of strings is named by its address in memory
            load = next(s for s in segments if s[0] == _LOAD and s[3] <= address < s[3] + s[5])

            def text(offset: int) -> str:
                # one by one: libraries of CUDA have tables of many megabytes
                file.seek(load[2] + address - load[3] + offset)
                name, end, _ = file.read(_LONGEST_TEXT).partition(b"\0")
                if not end:
                    raise ValueError("a text is cut off")
                return name.decode("utf-8", "replace")

            needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
            named = {tag: text(values[tag]) for tag in (_SONAME, _RPATH, _RUNPATH) if tag in values}
    except (OSError, struct.error, ValueError, LookupError, StopIteration):
        return None
    paths = (tuple(filter(None, named.get(tag, "").split(":"))) for tag in (_RPATH, _RUNPATH))
    return Needs(str(path), machine, named.get(_SONAME, ""), needed, *paths)


def linked_files(root: str = "/") -> Iterator[Needs]:
    """Finds every program and library below a folder that is linked dynamically."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if f"{folder}{name}" not in _HIDDEN]
        for path in (Path(folder, name) for name in files):
            if not path.is_symlink() and (needs := read_needs(path)):
                yield needs


class Loader:
    """Looks for libraries where the loader of an image does, and in its Python packages."""

    def __init__(
        self, files: Sequence[Needs], environment: Mapping[str, str], root: str = ""
    ) -> None:
        self._root = root
        self._environment = [p for p in environment.get("LD_LIBRARY_PATH", "").split(":") if p]
        triplets = [p.name for p in Path(f"{root}/usr/lib").glob("*-linux-gnu*")]
        usual = [f"{top}/{name}" for top in ("/lib", "/usr/lib") for name in triplets]
        usual += ["/lib", "/usr/lib", "/lib64", "/usr/lib64"]
        self._system = [*self._configured(Path(f"{root}/etc/ld.so.conf")), *usual]
        self._machines = {Path(each.path).resolve(): each.machine for each in files}
        self._known: dict[str, int | None] = {}
        # Python code loads some libraries of its own packages first, and what is loaded already
        # is found by its name alone: torch does so for all that is linked with it.
        self._loaded: dict[tuple[int, str], str] = {}
        for each in (each for each in files if _PACKAGES in each.path):
            for name in {each.soname, Path(each.path).name}:
                self._loaded.setdefault((each.machine, name), each.path)

    def find(self, file: Needs, name: str) -> str | None:
        """Returns the file that a needed name leads to; none where the image has no such file."""
        if "/" in name:
            return name if Path(self._root + name).exists() else None
        # found by walking: no part of its path is a link
        origin = str(Path(file.path).parent)
        # an RPATH counts only where there is no RUNPATH
        before = file.rpath if not file.runpath else ()
        for folder in (*before, *self._environment, *file.runpath, *self._system):
            own = folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
            path = f"{own if 'ORIGIN' in folder else self._root + folder}/{name}"
            if path not in self._known:
                place = Path(path)
                # most places hold nothing, and to look is cheaper than to resolve
                self._known[path] = self._machines.get(place.resolve()) if place.exists() else None
            if self._known[path] == file.machine:
                return path
        return self._loaded.get((file.machine, name)) if _PACKAGES in file.path else None

    def _configured(self, path: Path) -> list[str]:
        """The folders of ld.so.conf, with what it includes."""
        folders: list[str] = []
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        for line in (line.partition("#")[0].strip() for line in lines):
            if line.startswith("include "):
                pattern = line.split(None, 1)[1].lstrip("/")
                for each in sorted(Path(f"{self._root}/").glob(pattern)):
                    folders += self._configured(each)
            elif line:
                folders.append(line)
        return folders


def missing_libraries(files: Sequence[Needs], loader: Loader, machine: int) -> dict[str, list[str]]:
    """Returns the names that no file of the image answers to, and which files ask for them."""
    missing: dict[str, list[str]] = {}
    for file in files:
        # code of other machines is data: a library for a card's own processor, for example
        if file.machine != machine:
            continue
        for name in file.needed:
            if loader.find(file, name) is None:
                missing.setdefault(name, []).append(file.path)
    return {name: sorted(missing[name]) for name in sorted(missing)}
